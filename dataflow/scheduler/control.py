"""The scheduler at run time: starts the workers, tells them what to do, watches them, stops them.

No rollout and no weight passes through it.
"""

import dataclasses
import signal
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dataflow.errors import GraphError, Replaced, RunError, WorkerDied
from dataflow.folder.faults import Faults
from dataflow.folder.snapshot import Handover
from dataflow.graph import Graph
from dataflow.limits import Limits as Limits
from dataflow.limits import drains_too_long, joins_too_long, starts_too_long
from dataflow.planning.plan import Plan
from dataflow.planning.wiring import edges
from dataflow.scheduler.attempts import WorkerState, addresses, all_ended, how, is_of, obituary, overdue
from dataflow.scheduler.commands import answer
from dataflow.scheduler.control_server import Asker, Desk
from dataflow.scheduler.recovery import Recovery, Restart
from dataflow.scheduler.scaling import Fork, Order, Say, Scaling, Tell
from dataflow.scheduler.sigstop_watch import Stops
from dataflow.scheduler.stall_watch import Attendant
from dataflow.scheduler.state_machine import Conductor, Word
from dataflow.system.files import only_told
from dataflow.system.security import RunKeys
from dataflow.worker import worker
from dataflow.worker.host import Settings

_LAST_WORDS_S = 1.0
"""For what a worker said before it ended to arrive, whatever the others say meanwhile."""


class Scheduler:
    """One run.

    consumes: hello, ready, done, beat, failed and bye from the workers; deaths from the forkserver; commands
    produces: wire, start, tell, stop and the words of `scaling`; answers to commands; restarts, lines of faults.jsonl
    waits for: the workers, each wait with a deadline
    unblocked by: their messages; a worker that dies, fails, hangs or is stuck is started again, as `recovery` says. It
        ends the run with its cause when that is hopeless, when not all were ready once, and a trainer when the run ends
    """

    def __init__(
        self, graph: Graph, plan: Plan, settings: Settings, *, limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic, desk: Desk | None = None,
        successor: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        """Without a desk, fork the forkserver: call this before there are threads. limits: those of the settings when
        None. successor: as `Desk` has it."""
        self.graph, self.plan, self.limits = graph, plan, limits or settings.limits
        self._settings, self._clock = settings, clock
        self.conductor = Conductor(graph, plan)
        self.scaling = Scaling(graph, plan)
        self.recovery = Recovery(self.limits.patience)
        self.said: list[str] = []
        """What the user may want to read, oldest first; whoever shows it takes it out."""
        self._faults = Faults(settings.folder, clock, self.said)
        self._stops = Stops(self._faults, self.limits.stopped_s, clock)
        self._schedule = sorted(plan.scale.items())
        self._join_deadline = 0.0
        self.workers: dict[str, WorkerState] = {}
        self._running: set[str] = set()
        """Workers that have a process."""
        self._begun = False
        """Whether all were ready once."""
        self._ended: set[str] = set()
        self._deadline = 0.0
        self._watched = clock()
        """When it last looked whether anybody hangs."""
        self._wish = False
        if desk is None:
            keys = RunKeys.make() if settings.listen else None
            self._settings = dataclasses.replace(settings, keys=keys.to_plain() if keys else {})
            environment = worker.environment(max((p.threads for p in plan.placements.values()), default=1))
            desk = Desk(
                lambda plain: worker.main(graph, plan, plain), environment,
                lambda: worker.preload(graph.operators.values()), settings.listen, keys, successor,
                f"{settings.folder}/logs" if settings.folder else "",
            )  # fmt: skip
        self._desk, self.check = desk, desk.check
        self.handover = Handover(self._desk.folder, parts={
            "conductor": self.conductor.to_plain, "scaling": self.scaling.to_plain, "schedule": lambda: self._schedule,
            "workers": lambda: {name: state.to_plain() for name, state in self.workers.items()},
            "ended": lambda: sorted(self._ended),
        }, number=desk.number)  # fmt: skip
        desk.ahead, desk.told = self._leave_handover, self.said.append
        self.attendant = Attendant(self.conductor, self.workers, self._desk.send, settings, self.limits, clock)

    @property
    def address(self) -> str:
        """Where commands are taken."""
        return self._desk.commands

    def start(self, progress: Callable[[Collection[str]], None] = lambda late: None) -> None:
        """Start all workers, light ones first, until all are ready. progress: told who is not. Errors: RunError."""
        for name, replica, nodes in sorted(self.plan.processes(), key=lambda each: not self.graph.is_light(each[2])):
            self._spawn(name, replica, device=self.plan.placements[nodes[0]].device(replica))
        deadline, wired = self._clock() + self.limits.start_s, False
        while not all(state.state == "ready" for state in self.workers.values()):
            self.turn(0.1)
            if not wired and all(state.pid and state.state != "forked" for state in self.workers.values()):
                wired = True
                for state in self.workers.values():
                    state.wired = True
                self._broadcast({"kind": "wire", "addresses": addresses(self.workers.values())})
            progress(late := [state.name for state in self.workers.values() if state.state != "ready"])
            if self._clock() > deadline:
                raise starts_too_long(self.limits, self._settings.folder, late)
        self._begun = True
        self._say(self.conductor.start())
        self._broadcast({"kind": "start"})
        self._obey(self.scaling.begin({state.name: state.addresses for state in self.workers.values()}))
        self._desk.stay(self.limits.adopt_s, self.limits.drain_s, self.limits.silent_s)

    def scale(self, node: str, replicas: int) -> None:
        """Let processes of a node join, or leave when they have done what they have, until it has so many.

        Raises GraphError when the node cannot have them, RunError when the run is ending.
        """
        self._scale({node: replicas})

    @property
    def beats(self) -> dict[str, Mapping[str, Any]]:
        """The last that every worker said of itself, those that left included; `member` tells how it is in the run."""
        return {
            name: {**state.told, "member": "restarting" if state.is_away else self.scaling.state(name)}
            for name, state in self.workers.items()
        }

    def turn(self, wait_s: float) -> None:
        """Take in what has come within `wait_s`; raises what ends the run."""
        said, events = self._desk.wait(wait_s)
        for name, message in said:
            self._take(name, message)
        for event in events:
            self._note(event)
        self._keep_to_schedule()
        if self._wish and not self.conductor.draining:
            self._drain()
        self._watch()
        self.recovery.progressed(self.conductor.progress, self._clock())
        for restart in self.recovery.due(self._clock()):
            self._restart(restart)
        self.said += self.attendant.look()

    def wish_drain(self) -> None:
        """Ask to finish the step under way, write a checkpoint and end; may be called from a signal handler."""
        self._wish = True

    def _drain(self) -> None:
        self._deadline = self._clock() + self.limits.drain_s
        self.recovery.end()
        for state in self.workers.values():
            if state.state == "down":
                self._give_up(state)
        self._say(self.conductor.drain())

    def close(self) -> None:
        """Stop the workers, by force after the limit; leave no process and no socket behind. Errors: Replaced: they are
        another scheduler's, and nothing of the run was touched."""
        try:
            self.check()
            self.recovery.end()
            self._broadcast({"kind": "stop"})
            deadline = self._clock() + self.limits.stop_s
            while self._clock() < deadline and any(self._may_wind_down(state) for state in self.workers.values()):
                for event in self._desk.wait(0.05)[1]:
                    self._count(event)
            self._faults.close()
            self._desk.close()
        except Replaced:
            self._desk.leave()
            raise

    def pause(self, is_paused: bool) -> None:
        """Let all workers stand still, or go on."""
        self._desk.pause(is_paused)

    def _take(self, who: str | Asker, message: Mapping[str, Any]) -> None:
        if isinstance(who, Asker):
            self._desk.send(who, answer(message, self._command, self.attendant.answer, self.wish_drain))
            return
        state, name = self.workers.get(who), who
        if state is None:
            self._desk.refuse(f"'{who}', who is no worker,")
            return
        if message.get("attempt", state.settings.attempt) != state.settings.attempt or not state.is_live:
            return  # the last words of an attempt that has ended
        kind = message["kind"]
        if not is_of(state, message, edges(self.graph)):
            self._desk.refuse(f"'{who}'")
            return
        if state.state != "dying":
            state.heard = self._clock()
        elif kind != "beat":
            return
        if kind == "hello":
            state.pid, state.state, state.addresses = message["pid"], "starting", message["addresses"]
            if self._begun:
                self._obey(self.scaling.hello(name, state.addresses))
        elif kind == "ready":
            state.state = "ready"
            if self._begun:
                self._go_on(state)
        elif kind == "done":
            self._obey(self.scaling.confirmed(message["ticket"]))
        elif kind == "beat":
            state.beat = message
            self._desk.send(name, {"kind": "heard"})
            if message["drained"]:
                self._obey(self.scaling.drained(name))
            if message.get("alone"):
                return  # it ends because nobody spoke to it, not because anything is done
            for node, report in message["nodes"].items():
                self._say(self.conductor.hear(node, report["status"]))
                if report["ended"] and node not in self._ended and all_ended(node, self.workers.values()):
                    self._ended.add(node)
                    self._say(self.conductor.ended(node))
        elif kind == "stacks":
            self.attendant.hear(name, message["threads"])
        elif kind == "failed":
            state.die(f"failed: {message['message']}", self._clock(), lasting=message.get("lasting") is True)
            if not self._begun:
                raise RunError(f"worker '{name}' {state.cause}")
        elif kind == "bye":
            state.state = "stopping"

    def _go_on(self, state: WorkerState) -> None:
        """Let one that has just become ready begin: a newcomer, or one that was started again."""
        for word in [word for node in state.nodes for word in self.conductor.words_for(node)]:
            self._tell(state, word)
        self._obey(self.scaling.ready(state.name))
        self.recovery.recovered(state.name, self._clock())
        self._faults.recovered(state.name)

    def _note(self, event: Mapping[str, Any]) -> None:
        self._count(event)
        if event["event"] == "gone":
            raise WorkerDied(f"the forkserver ended unexpectedly; see logs in {self._settings.folder}/logs")
        state = self.workers.get(event["name"])
        if state is None or event["event"] == "started" or self._stops.note(state, event["event"]):
            return
        if self.scaling.leaves(state.name):
            state.state = "left"
            self._obey(self.scaling.exited(state.name))
        elif state.state == "stopping":
            state.state = "gone"
        elif state.is_live:
            if state.state != "dying" and event["status"] > 0:
                for name, message in self._desk.last_words(_LAST_WORDS_S):
                    self._take(name, message)
            self._fell(state, state.cause or how(event["status"]))

    def _count(self, event: Mapping[str, Any]) -> None:
        """Keep the names of those that have a process."""
        if event["event"] == "started":
            self._running.add(event["name"])
        elif event["event"] == "exited":
            self._running.discard(event["name"])
        elif event["event"] == "gone":
            self._running.clear()

    def _fell(self, state: WorkerState, cause: str) -> None:
        """A worker has ended that should not have: start it again later, if there is hope."""
        heard, attempt = state.heard, state.settings.attempt
        state.fall(cause)
        if not self._begun:
            raise WorkerDied(obituary(state))
        self._faults.noticed(state.name, cause, attempt, heard)
        if self._ending:
            self._give_up(state)
            return
        self._obey(self.scaling.fell(state.name))
        self.recovery.died(state.name, cause, self._clock(), lasting=state.lasting)
        if self.recovery.hopeless is not None:
            raise (RunError if state.lasting else WorkerDied)(f"{self.recovery.hopeless} ({self._settings.folder})")

    def _give_up(self, state: WorkerState) -> None:
        """A worker is down while the run is ending: without a trainer that is not done it cannot end as it should."""
        if any(self.graph.operators[node].trains and not self.conductor.is_done(node) for node in state.nodes):
            raise WorkerDied(f"{obituary(state)}; the run was ending, and its last checkpoint is good")
        state.state = "gone"

    def _restart(self, restart: Restart) -> None:
        state = self.workers[restart.worker]
        settings = dataclasses.replace(
            state.settings, attempt=restart.attempt, senders=self.scaling.senders(state.name), at=state.addresses
        )
        self._fork(state, settings)
        if state.name == self.scaling.joining:
            self._join_deadline = self._clock() + self.limits.start_s

    def _kill(self, state: WorkerState, cause: str) -> None:
        """End a worker that does not go on by itself."""
        if not self._begun:
            state.cause = cause
            raise WorkerDied(obituary(state))
        state.die(cause, self._clock())
        self._desk.kill(state.name, signal.SIGKILL)

    def _watch(self) -> None:
        now, before = self._clock(), self._watched
        self._watched = now
        for state in self.workers.values():
            if now - before > self.limits.hang_s:
                state.heard = now  # the scheduler was stopped itself, and perhaps the workers with it
            if self._stops.let_go_on(state):
                self._desk.kill(state.name, signal.SIGCONT)
            cause = overdue(state, self.limits, now, begun=self._begun)
            if cause is not None:
                self._kill(state, cause)
        if self.conductor.draining and not self.conductor.over and now > self._deadline:
            raise drains_too_long(self.limits, self._settings.folder)
        name = self.scaling.joining
        if name is not None and now > self._join_deadline:
            raise joins_too_long(self.limits, self._settings.folder, name, self.scaling.missing())

    @property
    def _ending(self) -> bool:
        return self.conductor.draining or self.conductor.over

    def _spawn(self, worker: str, replica: int, **more: Any) -> None:
        """Ask the forkserver for the first process of a worker."""
        name, now = f"{worker}-{replica}", self._clock()
        settings = self._settings_of(worker, replica, **more)
        self.workers[name] = state = WorkerState(name, self.plan.workers[worker], settings, forked=now, heard=now)
        self._fork(state, settings)

    def _settings_of(self, worker: str, replica: int, **more: Any) -> Settings:
        return dataclasses.replace(
            self._settings, worker=worker, replica=replica, control=self._desk.address, sockets=str(self._desk.folder),
            limits=self.limits, **more,
        )  # fmt: skip

    def _fork(self, state: WorkerState, settings: Settings) -> None:
        state.fork(settings, self._clock())
        trains = any(self.graph.operators[node].trains for node in state.nodes)
        self._desk.spawn(state.name, settings.to_plain(), not self.graph.is_light(state.nodes), trains)

    def _scale(self, wishes: Mapping[str, int]) -> None:
        if self._ending:
            raise RunError(f"the run is ending, and {dict(wishes)} would come too late; start another run")
        self._obey(self.scaling.scale(wishes))

    def _keep_to_schedule(self) -> None:
        """Wish for what the plan has for this step; what has no room beside what else was wished is only told."""
        while self._schedule and self._schedule[0][0] <= self.conductor.step and not self._ending:
            try:
                self._scale(self._schedule.pop(0)[1])
            except GraphError as error:
                self.said.append(str(error))

    def _command(self, wishes: Mapping[str, int]) -> dict[str, dict[str, int]]:
        self._scale(wishes)
        return {node: self.scaling.replicas(node) for node in wishes}

    def _obey(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case Fork():
                    device = f"cuda:{order.gpus[0]}" if order.gpus else "cpu"
                    self._join_deadline = self._clock() + self.limits.start_s
                    self._spawn(order.node, order.replica, device=device, senders=order.senders)
                case Say():
                    self._pass_on(self.workers[order.to], order.word)
                case Tell():
                    self.said.append(order.text)

    def _pass_on(self, state: WorkerState, word: Mapping[str, Any]) -> None:
        """Send a word of `scaling`; one that was started again learns with `wire` what it missed."""
        if word["kind"] == "wire":
            state.wired = True
        if state.wired:
            self._desk.send(state.name, word)

    def _may_wind_down(self, state: WorkerState) -> bool:
        return state.name in self._running and state.pid > 0 and state.state != "dying"

    def _leave_handover(self) -> None:
        """For a successor, before what was decided is said."""
        if self._begun:
            with only_told(self.said):
                self.handover.write()

    def _say(self, words: list[Word]) -> None:
        for word in words:
            for state in self.workers.values():
                if word.node in state.nodes and state.state == "ready":
                    self._tell(state, word)

    def _tell(self, state: WorkerState, word: Word) -> None:
        self._desk.send(state.name, {"kind": "tell", "node": word.node, "message": dict(word.message)})

    def _broadcast(self, message: Mapping[str, Any]) -> None:
        for name in self.workers:
            self._desk.send(name, message)
