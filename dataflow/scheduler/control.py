"""The scheduler at run time: it passes events to the reducer of its table, and carries out what
that decides.

No rollout and no weight passes through it.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.agent.workload import ForkWorkload
from dataflow.errors import DataflowError, Replaced, RunError
from dataflow.folder.faults import Faults
from dataflow.folder.live_changes import KnobChange, latest_swaps
from dataflow.folder.request_log import RequestLog
from dataflow.folder.snapshot import SnapshotFile
from dataflow.graph import Graph
from dataflow.planning.plan import Plan
from dataflow.scheduler import events, live_changes, scaling, seating
from dataflow.scheduler.control_server import Client, ControlServer
from dataflow.scheduler.reducer import reduce
from dataflow.scheduler.requests import (
    CheckpointKept,
    KeepCheckpoint,
    KnobsSet,
    Reply,
    Request,
    SetKnobs,
    SwapNode,
    TellFacts,
    answer,
    in_short,
    outcome,
)
from dataflow.scheduler.stall_watch import StallWatch
from dataflow.scheduler.swap_requests import SwapRequests
from dataflow.scheduler.table import ProcessState, Table, WorkerRecord
from dataflow.system.clocks import Seldom
from dataflow.system.files import only_told
from dataflow.system.messages import Life, Refused
from dataflow.system.security import RunKeys
from dataflow.worker.host import Settings
from dataflow.worker.kept_counts import CrossedByFile, KeptFiles
from dataflow.worker.messages import ToWorker

# Whoever asks for other values of knobs: checked at once, taken in, and answered when every
# worker goes by them.

BOUNDARY_S = 20.0
"""Seconds until all changes reach their boundaries; then the requester is told that they will."""


@dataclass
class _PendingSet:
    """A request that waits for its changes to count."""

    client: Client
    request: SetKnobs
    changes: Sequence[KnobChange]
    until: float


class KnobRequests:
    """The changes under way.

    consumes: requests; what the workers' heartbeats say
    produces: changes; replies
    waits for: the workers, each of which says which change it goes by
    unblocked by: their heartbeats; a limit, after which whoever asked is answered
    """

    def __init__(
        self,
        table: Table,
        take_in: Callable[[Sequence[KnobChange]], None],
        reply: Callable[[Client, SetKnobs, Reply], None],
        clock: Callable[[], float],
    ) -> None:
        """take_in: lets changes count that were checked."""
        self._table, self._take_in, self._reply, self._clock = table, take_in, reply, clock
        self._pending: list[_PendingSet] = []

    def ask(self, client: Client, request: SetKnobs) -> None:
        """Begin with a request, or say at once why not."""
        try:
            changes = live_changes.plan_changes(
                self._table, request.wishes, request.by, time.time()
            )
        except DataflowError as error:
            self._reply(client, request, Refused(f"{error} (the run goes on as it was)"))
            return
        self._take_in(changes)
        self._pending.append(_PendingSet(client, request, changes, self._clock() + BOUNDARY_S))

    def look(self) -> None:
        """Answer requesters once the outcome is known, or the time is up."""
        for pending in list(self._pending):
            late = live_changes.late(self._table, pending.changes[-1].number)
            if late and self._clock() <= pending.until:
                continue
            self._pending.remove(pending)
            marks = ", ".join(change.mark for change in pending.changes)
            text = f"{marks} from now on"
            if late:
                text = (
                    f"{marks} is taken in, and counts with {late} at the next boundary, which has"
                    " not come yet"
                )
            self._reply(pending.client, pending.request, KnobsSet(text))


# Whoever asks for a checkpoint: each trainer writes one after the step under way, and the asker
# hears of it then.

WRITTEN_S = 45.0
"""Seconds for the step under way to end and its checkpoint to be written; then the requester is
told that it will be."""


@dataclass
class _PendingCheckpoint:
    """A request that waits for its checkpoint."""

    client: Client
    request: KeepCheckpoint
    number: int
    until: float


class CheckpointRequests:
    """The checkpoints under way that were asked for.

    consumes: requests; what trainers say of themselves
    produces: wishes, which a trainer that is started again hears too; replies
    waits for: the trainers
    unblocked by: their heartbeats; a limit, after which whoever asked is answered
    """

    def __init__(
        self,
        table: Table,
        wish: Callable[[int], None],
        reply: Callable[[Client, KeepCheckpoint, Reply], None],
        clock: Callable[[], float],
    ) -> None:
        """wish: lets each trainer write one, by its number."""
        self._table, self._wish, self._reply, self._clock = table, wish, reply, clock
        self._pending: list[_PendingCheckpoint] = []

    def ask(self, client: Client, request: KeepCheckpoint) -> None:
        """Begin with a request, or say at once why not."""
        run = self._table.run
        if self._table.is_ending or not self._table.begun or not run.checkpoints():
            state = "is ending and writes its last one" if self._table.is_ending else "is starting"
            state = state if run.checkpoints() else "trains nothing"
            why = f"a checkpoint is wanted of a run that {state}; ask one that is at work on steps"
            self._reply(client, request, Refused(why))
            return
        number = run.checkpoint + 1
        self._wish(number)
        self._pending.append(_PendingCheckpoint(client, request, number, self._clock() + WRITTEN_S))

    def look(self) -> None:
        """Answer requesters once it is written, or the time is up."""
        for pending in list(self._pending):
            late = self._table.run.without_checkpoint(pending.number)
            if late and self._clock() <= pending.until:
                continue
            self._pending.remove(pending)
            steps = self._table.run.checkpoints()
            text = "; ".join(
                f"'{trainer}' has the checkpoint of step {step}" for trainer, step in steps.items()
            )
            if late:
                text = f"it is taken in, but {late} have not written it within {WRITTEN_S:.0f} s"
            self._reply(pending.client, pending.request, CheckpointKept(text))


NAME = "scheduler"
"""The name in faults.jsonl."""
_DRAIN_S = 1.0
"""Seconds for messages that a worker sent before it ended to arrive, while others go on sending."""
_LAST_WORDS_S = 0.05
"""Seconds for messages of ended workers to arrive."""
_FEW, _LOOKED_AT_A_SECOND = 256, 20_000
"""Above so many workers, only so many deadlines are checked in a second."""


class Scheduler:
    """One run.

    consumes: messages of the workers; what the forkserver tells of their processes; requests
    produces: messages to workers, processes, signals; replies; lines of faults.jsonl; the snapshot
        of its table
    waits for: the workers, each wait with a deadline
    unblocked by: their messages; a worker that dies, fails, hangs or is stuck is started again, as
        `recovery` says. It ends the run with its cause when that is hopeless, when it says why it
        cannot start, and a trainer at the end
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        server: ControlServer | None = None,
        snapshot: Mapping[str, Any] | None = None,
        standby: Callable[[], int] | None = None,
    ) -> None:
        """Without a server, fork the forkserver: call this before there are threads. snapshot: of
        the scheduler before, whose workers the server has. standby: as `ControlServer` has it.
        """
        limits = settings.run.limits
        self._clock = clock
        self.table = Table(
            graph=graph, plan=plan, limits=limits, folder=settings.folder, watched_at=clock()
        )
        self.notices: list[str] = []
        """Sentences for the user, oldest first; the reader removes them."""
        self.crossed: CrossedByFile = {}
        """What has crossed the edges, as workers of this machine counted it to their ends; known
        once it is closed."""
        self._faults = Faults(settings.folder, clock, self.notices)
        self._request_log = RequestLog(settings.folder, self.notices.append)
        self._wish, self._stop_s = False, limits.stop_s
        self._ticked = float("-inf")
        keys: Mapping[str, bytes] = {}
        if server is None:
            run_keys = RunKeys.make() if settings.listen else None
            keys = run_keys.to_plain() if run_keys else {}
            work = ForkWorkload.of(graph, plan)
            server = ControlServer(
                work.main,
                work.environment,
                work.preload,
                settings.listen,
                run_keys,
                standby,
                f"{settings.folder}/logs" if settings.folder else "",
            )
        elif server.keys is not None:
            keys = server.keys.to_plain()
        self._earlier = snapshot
        self.table.swaps.made, self.table.changes = (
            latest_swaps(settings.swaps),
            list(settings.changes),
        )
        if snapshot is not None:
            self.table.take_up(snapshot["table"])
        self._settings = dataclasses.replace(settings, keys=keys)
        self._server, self.check = server, server.check
        self.table.scheduler = server.number
        self.snapshot = SnapshotFile(
            server.left, {"table": self.table.to_plain}, server.number, self._clock
        )
        server.ahead, server.told = self._leave_snapshot, self.notices.append
        self.stall_watch = StallWatch(self.table, self._send, settings, clock)
        self._swap_requests = SwapRequests(
            self.table,
            server,
            lambda record: self._of(record, record.host),
            swap_in=lambda swap: self._apply(events.SwapIn(swap)),
            reply=self._reply,
            clock=clock,
        )
        self._knob_requests = KnobRequests(
            self.table, lambda changes: self._apply(events.SetIn(changes)), self._reply, clock
        )
        self._checkpoint_requests = CheckpointRequests(
            self.table,
            lambda number: self._apply(events.WishCheckpoint(number)),
            self._reply,
            clock,
        )

    @property
    def address(self) -> str:
        """Where requests are taken."""
        return self._server.requests

    @property
    def folder(self) -> Path:
        """The folder of this process's sockets."""
        return self._server.folder

    def start(self, progress: Callable[[Collection[str]], None] = lambda late: None) -> None:
        """Start all workers, light ones first, until all are ready; or go on with those of the
        scheduler before.

        progress: told who is not ready. Errors: RunError.
        """
        if self._earlier is not None:
            self._take_over()
            return
        self._apply(events.RunBegins())
        seldom = Seldom()

        def look() -> None:
            progress(
                [record.name for record in self.table if record.process is not ProcessState.READY]
            )

        while not (self.table.begun or self.table.run.over):
            self.turn(0.1)
            seldom(look)
        look()

    def scale(self, wishes: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """Let processes of nodes join, or leave when they have done what they have, until each node
        has so many; what they have now.

        Raises GraphError when a node cannot have them, RunError when the run is ending.
        """
        if self.table.is_ending:
            raise RunError(
                f"the run is ending, and {dict(wishes)} would come too late; start another run"
            )
        scaling.check(self.table, wishes)
        self._apply(events.Wish(wishes))
        return {node: scaling.replicas(self.table, node) for node in wishes}

    @property
    def heartbeats(self) -> dict[str, Mapping[str, Any]]:
        """The last heartbeat of every worker, those that left included; `member` tells its
        membership.
        """
        return {
            record.name: {
                **record.told,
                "member": "restarting" if record.is_away else str(record.membership),
            }
            for record in self.table
        }

    def turn(self, wait_s: float) -> None:
        """Take in what has come within `wait_s`; raises what ends the run."""
        messages, requests, server_events = self._server.wait(wait_s)
        self._receive(messages)
        for client, request in requests:
            match request:
                case SwapNode():
                    self._swap_requests.ask(client, request)
                case SetKnobs():
                    self._knob_requests.ask(client, request)
                case KeepCheckpoint():
                    self._checkpoint_requests.ask(client, request)
                case _:
                    told_now = answer(request, self.scale, self.stall_watch.answer, self.wish_drain)
                    self._reply(client, request, told_now)
        for event in server_events:
            self._note(event)
        if self._wish and not self.table.run.draining:
            self._apply(events.Drain())
        self._pass_time()
        for pending in (self._swap_requests, self._knob_requests, self._checkpoint_requests):
            pending.look()
        self.notices += self.stall_watch.look()

    def _reply(self, client: Client, request: Request, reply: Reply) -> None:
        """Answer a request; one that would change the run is put on record."""
        if not isinstance(request, TellFacts):
            self._request_log.write(
                request.by,
                in_short(request),
                self.table.run.step,
                outcome(reply),
                refused=isinstance(reply, Refused),
            )
        self._server.reply(client, reply)

    def _pass_time(self) -> None:
        """Apply what follows from time alone; with many workers not in every turn."""
        now, many = self._clock(), len(self.table.workers) - _FEW
        if 0 <= now - self._ticked < many / _LOOKED_AT_A_SECOND:
            return
        self._ticked = now
        self._apply(events.Tick())
        for host in self.table.hosts.values():
            if not host.is_alive:
                self._server.seek(host.facts.name)

    def wish_drain(self, stop_s: float = math.inf) -> None:
        """Ask to finish the step under way, write a checkpoint and end; may be called from a signal
        handler. stop_s: for workers to wind down after that, if it is less than `Limits.stop_s`.
        """
        self._wish, self._stop_s = True, min(self._stop_s, stop_s)

    def close(self) -> None:
        """Stop the workers, by force after the limit; leave no process and no socket behind.
        Errors: Replaced: they are another scheduler's, and nothing of the run was touched.
        """
        try:
            self.check()
            self._apply(events.Shutdown())
            deadline = self._clock() + (self._stop_s if self.table.begun else 0.0)
            while self._clock() < deadline and any(record.may_wind_down for record in self.table):
                messages, _, server_events = self._server.wait(0.05)
                self._receive(messages)
                for event in server_events:
                    self._note(event)
            self._receive(self._server.drain(_LAST_WORDS_S))
            self._faults.close()
            with KeptFiles(self._server.sockets) as files:
                self._server.close()
                self.crossed = files.read()
        except Replaced:
            self._server.leave()
            raise

    def pause(self, is_paused: bool) -> None:
        """Let all workers stand still, or go on."""
        self._server.pause(is_paused)

    def _take_over(self) -> None:
        """Take over the run where it stands; it goes on at once."""
        server = self._server
        was = "did not answer" if server.lives else "ended"
        self._faults.noticed(NAME, was, server.number - 1, self._clock() - server.alone_s)
        processes = {
            event["name"]: events.KeptProcess(
                Life(*event["settings"]["life"]), event["pid"], event["alive"], event["status"]
            )
            for event in server.handed
        }
        self._apply(events.TakeOver(processes))
        why = f"whose scheduler {was}: without one for {server.alone_s:.1f} s"
        self._faults.recovered(NAME, f"process {os.getpid()} goes on with the run, {why}")

    def _receive(self, messages: Iterable[events.Received]) -> None:
        for received in messages:
            if not self._swap_requests.hear(received.name, received.message):
                self._apply(received)

    def _note(self, event: Mapping[str, Any]) -> None:
        """Take in what the forkserver reports; before a worker's failure, what the worker itself
        sent.
        """
        match event["event"]:
            case "gone":
                self._apply(events.ForkserverGone())
            case "heard":
                self._apply(events.HostHeard(event["name"]))
            case "leaves":
                self._keep_before_leave(event["name"])
            case "lost":
                self._apply(events.HostLost(event["name"], event["cause"]))
            case "joined":
                processes = {
                    process.name: events.KeptProcess(
                        Life(*process.settings["life"]), process.pid, process.alive, process.status
                    )
                    for process in event["processes"].values()
                }
                self._apply(events.HostJoined(event["host"], processes))
            case _:
                self._note_process(event)

    def _keep_before_leave(self, host: str) -> None:
        """A host was asked to end: write a checkpoint, so that what is trained by then is not lost
        with it.
        """
        if self.table.begun and not self.table.is_ending:
            self.notices.append(
                f"host '{host}' was asked to end, and leaves; trainers write a checkpoint before"
            )
            self._apply(events.WishCheckpoint(self.table.run.checkpoint + 1))

    def _note_process(self, event: Mapping[str, Any]) -> None:
        record = self.table.workers.get(event["name"])
        if event["event"] == "exited":
            self._swap_requests.ended(event["name"])
        failed = event["event"] == "exited" and event["status"] > 0
        if (
            failed
            and record is not None
            and record.is_live
            and record.process not in (ProcessState.DYING, ProcessState.ENDING)
        ):
            self._receive(self._server.drain(_DRAIN_S))
        self._apply(
            events.ProcessEvent(
                event["name"], event["event"], event["status"], event.get("host", "")
            )
        )

    def _apply(self, event: events.Event) -> None:
        for command in reduce(self.table, event, self._clock()):
            self._execute(command)

    def _execute(self, command: events.Command) -> None:
        match command:
            case events.StartWorker():
                self._spawn(command)
            case events.StartRanks():
                self._start_ranks(command)
            case events.EndRanks():
                record = self.table.workers[command.name]
                for host in dict.fromkeys(record.rank_hosts):
                    self._server.dismiss(_of_ranks(command.name, command.life, host))
            case events.Send():
                self._send(command.to, command.message)
            case events.Signal():
                self._server.kill(command.to, command.number)
            case events.Clear():
                self._server.clear(command.host)
            case events.Outlive():
                limits = self.table.limits
                self._server.stay(limits.adopt_s, limits.drain_s, limits.silent_s)
            case events.NotifyUser():
                self.notices.append(command.text)
            case events.FaultNoticed():
                self._faults.noticed(
                    command.worker,
                    command.cause,
                    command.attempt,
                    command.heard_at,
                    command.rollouts,
                )
            case events.FaultRecovered():
                self._faults.recovered(command.worker, command.notice)
            case events.Refuse():
                self._server.refuse(command.name, "it names what is not its own")
            case events.EndRun():
                raise command.error

    def _send(self, to: str, message: ToWorker) -> None:
        self._server.send(to, message, self.table.workers[to].host)

    def _spawn(self, command: events.StartWorker) -> None:
        """Ask the forkserver for a process, which runs `worker.main`."""
        record, graph = self.table.workers[command.name], self.table.graph
        settings = dataclasses.replace(
            self._of(record, record.host),
            device=seating.device(self.table, record),
            senders=command.senders or {},
            at=record.at if record.received_at == record.host else {},
        )
        trains = any(graph.operators[node].trains for node in record.nodes)
        self._server.spawn(
            record.name, dataclasses.asdict(settings), not graph.is_light(record.nodes), trains
        )

    def _start_ranks(self, command: events.StartRanks) -> None:
        """Ask the forkservers of its other hosts for a process of a worker's ranks."""
        record = self.table.workers[command.name]
        for host in dict.fromkeys(record.rank_hosts):
            if host != record.host:
                settings = dataclasses.replace(self._of(record, host), ranks_at=command.at)
                self._server.spawn(
                    _of_ranks(record.name, record.life, host), dataclasses.asdict(settings), True
                )

    def _of(self, record: WorkerRecord, host: str) -> Settings:
        """The settings of a worker, or of its ranks on another host."""
        place: Mapping[str, Any] = self._server.place(host)
        return dataclasses.replace(
            self._settings,
            worker=record.worker,
            replica=record.replica,
            life=record.life,
            host=host,
            rank_hosts=record.rank_hosts,
            swaps=live_changes.own(self.table, record),
            changes=tuple(self.table.changes),
            rank_devices=tuple(seating.rank_devices(self.table, record))
            if record.rank_hosts
            else (),
            **place,
        )

    def _leave_snapshot(self) -> None:
        """Leave a snapshot for the next scheduler, before decisions are sent."""
        if self.table.begun:
            with only_told(self.notices):
                self.snapshot.write()


def _of_ranks(name: str, life: Life, host: str) -> str:
    """The name of the process of a worker's ranks on another host."""
    return f"{name}.{life.attempt}@{host}"
