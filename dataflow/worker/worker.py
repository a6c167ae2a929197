"""One worker process: hosts the operators that the plan puts together, and turns their loops until
told to stop.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import structlog
import zmq
from msgspec.structs import replace

from dataflow.errors import DataflowError, DeadlineError
from dataflow.folder.socket_folder import Whereabouts
from dataflow.graph import Graph
from dataflow.planning.plan import Plan
from dataflow.planning.wiring import edges
from dataflow.system import native
from dataflow.system.clocks import AwakeClock
from dataflow.system.interrupts import leave_to_leader
from dataflow.system.log import log_to
from dataflow.system.processes import machine
from dataflow.system.security import RunKeys
from dataflow.worker import messages, rank_line, weight_ports
from dataflow.worker.changed_knobs import roomiest
from dataflow.worker.cpu_watchdog import CpuWatchdog
from dataflow.worker.host import NodeLoops, Settings
from dataflow.worker.kept_counts import CrossedByFile
from dataflow.worker.link import SchedulerLink
from dataflow.worker.ports import Ports
from dataflow.worker.rank_line import RankLine
from dataflow.worker.swapped import swapped, try_swap

M = TypeVar("M", messages.Wire, messages.Start)

_NAP_MS = 100
_BLOCKED_NAP_MS = 5
_LEAST_PATIENCE_S = 5.0
"""The longest pause between two messages of a live scheduler."""


def main(graph: Graph, plan: Plan, plain: Mapping[str, Any]) -> int:
    """Run one worker; the exit status."""
    settings = msgspec.convert(plain, Settings)
    name = f"{settings.worker}-{settings.replica}" + (
        f"@{settings.host}" if settings.ranks_at else ""
    )
    leave_to_leader()
    log_to(Path(settings.folder) / "logs" / f"{name}.log")
    if settings.life.attempt:
        print(f"---- {name}, attempt {settings.life.attempt} ----")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if settings.ranks_at:
        return rank_line.main(graph, plan, settings)
    left_alone, clock = threading.Event(), AwakeClock()
    link = SchedulerLink(
        settings.control,
        name,
        settings.life,
        orphaned=left_alone.set,
        found=left_alone.clear,
        seek=partial(_seek, settings),
        patience_s=max(_LEAST_PATIENCE_S, settings.run.limits.adopt_s),
        keys=RunKeys.from_plain(settings.keys),
        clock=clock,
    )
    if settings.tries is not None:
        return try_swap(graph, plan, settings, link)
    try:
        worker = Worker(swapped(graph, settings.swaps), plan, settings, link, left_alone, clock)
        link.start(worker.heartbeat)
        worker.run()
    except BaseException as error:
        traceback.print_exc()
        link.start()
        link.send(
            messages.Failed(
                life=settings.life,
                error=type(error).__name__,
                message=str(error),
                traceback=traceback.format_exc(),
                lasting=isinstance(error, DataflowError) and error.is_lasting,
            )
        )
        link.close()
        return 1
    if worker.ended_alone:
        return messages.ALONE
    link.send(messages.Bye(life=settings.life, crossed=worker.crossed))
    link.close()
    return 0


class Worker:
    """The loop of one process.

    consumes: messages of the scheduler; deliveries; weights
    produces: batches; heartbeats; confirmations of messages that ask for one
    waits for: any of its sockets, when no operator can go on
    unblocked by: a message, a delivery, a grant, a weight message, or the nap's end
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        settings: Settings,
        link: SchedulerLink,
        left_alone: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """left_alone: set while no scheduler is there. clock: as the link's."""
        self._settings, self._link, self._clock = settings, link, clock
        self._left_alone = left_alone or threading.Event()
        self._ends_at: float | None = None
        self._nodes = plan.workers[settings.worker]
        self._graph, self._plan = graph, plan
        self._ports = Ports(roomiest(graph, settings.changes), plan, self._nodes, settings, clock)
        self._ranks = _rank_line(settings)
        self._host = NodeLoops(
            graph,
            plan,
            self._nodes,
            settings,
            writer_of=self._ports.writer_of,
            reader_of=self._ports.reader_of,
            device=lambda node: settings.device if plan.placements[node].gpus else "cpu",
            clock=clock,
            places=rank_line.places_of(
                settings, starts=self._ranks, meets_at=self._ranks.address if self._ranks else ""
            ),
        )
        self._process = psutil.Process()
        self._threads = max(
            plan.placements[node].threads_of(settings.replica) for node in self._nodes
        )
        self._running = True
        self._name = f"{settings.worker}-{settings.replica}"
        self._report: dict[str, messages.NodeReport] = {}
        self._depths: dict[str, tuple[int, int]] = {}
        self._crossed: CrossedByFile = {}
        self._changed = 0
        self._refreshed = 0.0
        self._early: list[messages.ToWorker] = []
        self._retiring: list[messages.RetireReceivers] = []
        self._drained = False
        self._state = "starting"
        self._turned = clock()
        self._watchdog = CpuWatchdog()

    def run(self) -> None:
        """Start up, work, wind down."""
        _set_threads(self._threads)
        if self._settings.device != "cpu":  # NCCL takes one interface for all groups of a process
            host = self._settings.listen if self._settings.host else ""
            os.environ["NCCL_SOCKET_IFNAME"] = f"={weight_ports.interface_of(host)}"
        log = structlog.get_logger(worker=self._name)
        inlets = self._ports.open_inlets(self._host)
        hello = messages.Hello(
            life=self._settings.life,
            pid=os.getpid(),
            addresses=inlets,
            lines=self._ports.lines,
            machine=machine(),
            ranks_at=self._ranks.address if self._ranks else "",
        )
        self._link.send(hello)
        wire = self._wait_for(messages.Wire)
        self._ports.read_from(wire.lines)
        self._host.build()
        self._host.wire(self._ports.inlets, self._ports.open_outlets(self._host, wire.addresses))
        self._refresh(force=True)
        self._host.record_swaps()
        self._host.record_changes()
        self._link.send(messages.Ready(life=self._settings.life, notes=tuple(native.NOTES)))
        self._wait_for(messages.Start)
        log.info("started", nodes=self._nodes, threads=self._threads, pid=os.getpid())
        self._turned, self._state = self._clock(), "running"
        while self._running:
            self._turned = self._clock()
            self._hear()
            self._ports.poll()
            if not self._host.turn():
                self._rest()
            self._part()
            self._refresh()
            if self._left_alone.is_set() or self.ended_alone:
                self._end_alone()
        self._state = "stopping"
        self._host.close()
        if self._ranks is not None:
            self._ranks.close()
        self._ports.close()
        log.info("stopped")

    @property
    def ended_alone(self) -> bool:
        """Whether it has begun to end, or has ended, because no scheduler was there."""
        return self._ends_at is not None

    @property
    def crossed(self) -> CrossedByFile:
        """What has crossed its edges, in this attempt and those before it."""
        return self._ports.crossed

    def heartbeat(self) -> messages.Heartbeat:
        """Called from the link's thread, reads only."""
        now = self._clock()
        turned_s = now - self._turned if self._state == "running" else 0.0
        nodes = {
            node: replace(
                report,
                status={**report.status, **self._host.runtimes[node].under_way()},
                **self._host.loops[node].spent(),
            )
            for node, report in self._report.items()
        }
        return messages.Heartbeat(
            life=self._settings.life,
            state=self._state,
            nodes=nodes,
            edges=self._depths,
            crossed=self._crossed,
            turned_s=turned_s,
            asleep_s=self._watchdog.look(turned_s, now),
            at=self._host.at,
            at_s=time.monotonic() - self._host.at_since,
            drained=self._drained,
            alone=self.ended_alone,
            changed=self._changed,
            rss_bytes=self._process.memory_info().rss,
        )

    def _refresh(self, force: bool = False) -> None:
        """Renew what the heartbeat carries, a few times a second."""
        now = time.monotonic()
        if force or now - self._refreshed > 0.1:
            self._refreshed = now
            self._host.keep_trace()
            self._report = {
                node: messages.NodeReport(**report) for node, report in self._host.report().items()
            }
            self._depths, self._crossed = self._ports.depths(), self.crossed
            self._changed = self._host.changed
            self._drained = (
                all(loop.ended for loop in self._host.loops.values()) and self._ports.drained
            )

    def _hear(self) -> None:
        received, self._early = [*self._early, *self._link.messages()], []
        for message in received:
            match message:
                case messages.NodeCommand():
                    self._host.tell(message.node, message.message)
                case messages.Stop():
                    self._running = False
                case messages.Expect():
                    self._ports.expect(message.senders)
                    self._confirm(message.ticket)
                case messages.ChangeKnobs():
                    if self._host.change(message.changes):
                        self._ports.grow(edges(roomiest(self._graph, message.changes)))
                case messages.SenderEnded():
                    self._ports.over(message.senders)
                case messages.Moved():
                    self._move(message)
                case messages.AddReceivers():
                    self._ports.add(message.receivers)
                case messages.RetireReceivers():
                    if message.ticket not in [retiring.ticket for retiring in self._retiring]:
                        self._ports.retire(message.receivers)
                        self._retiring.append(message)

    def _move(self, message: messages.Moved) -> None:
        self._ports.read_from(message.lines)
        self._ports.move(message.receivers, message.before)

        def now(edge: str, address: str) -> str:
            return message.receivers[edge] if address in message.before.get(edge, ()) else address

        self._retiring = [
            replace(
                message,
                receivers={edge: now(edge, address) for edge, address in message.receivers.items()},
            )
            for message in self._retiring
        ]

    def _part(self) -> None:
        """Confirm that receivers have gone, once they have."""
        for message in [
            retiring for retiring in self._retiring if self._ports.gone(retiring.receivers)
        ]:
            self._retiring.remove(message)
            self._confirm(message.ticket)

    def _end_alone(self) -> None:
        """No scheduler has come back: let trainers finish the step under way and write a
        checkpoint, then end.

        Where there is no trainer, the forkserver says when all others have ended, and any message
        that all goes on. A trainer that has begun to end is started again by whoever is the
        scheduler then.
        """
        operators = self._host.graph.operators
        trainers = [self._host.runtimes[node] for node in self._nodes if operators[node].trains]
        if self._ends_at is None:
            structlog.get_logger(worker=self._name).warning(
                "no scheduler is there any more: coming to an end"
            )
            self._ends_at = self._clock() + self._settings.run.limits.drain_s
            for node in self._who_drains():
                self._host.tell(node, {"drain": True})
        elif not trainers and not self._left_alone.is_set():
            structlog.get_logger(worker=self._name).warning("a scheduler has spoken: going on")
            self._ends_at = None
            for node in self._who_drains():
                self._host.tell(node, {"drain": False})
            return
        if trainers and all(runtime.status().get("done") for runtime in trainers):
            self._running = False
        elif self._clock() > self._ends_at:
            os._exit(messages.ALONE)

    def _who_drains(self) -> list[str]:
        """Trainers, and the nodes that take turns with them, which a checkpoint needs."""
        plan = self._host.plan
        return [
            node
            for node in self._nodes
            if self._host.graph.operators[node].trains or plan.turns_of(node)
        ]

    def _confirm(self, ticket: int) -> None:
        self._link.send(messages.Confirmed(life=self._settings.life, ticket=ticket))

    def _wait_for(self, kind: type[M]) -> M:
        """A message that comes when all workers have started."""
        deadline_s = self._settings.run.limits.start_s
        deadline = self._clock() + deadline_s
        while self._clock() < deadline:
            self._link.socket.poll(100)
            self._early += self._link.messages()
            for message in self._early:
                if isinstance(message, messages.Stop):
                    raise SystemExit(0)
                if isinstance(message, kind):
                    self._early.remove(message)
                    return message
        raise DeadlineError(
            f"worker '{self._settings.worker}' waited {deadline_s:.0f} s for the scheduler's"
            f" '{kind.__name__}' and did not get it; another worker may not have started: see the"
            " other logs of this run, or raise Limits.start_s"
        )

    def _rest(self) -> None:
        """Sleep until something arrives; short where an operator owes rows or waits for credit."""
        extra = [item for runtime in self._host.runtimes.values() for item in runtime.waits()]
        poller = zmq.Poller()
        for socket in [self._link.socket, *self._ports.sockets(), *extra]:
            poller.register(socket, zmq.POLLIN)
        loops = self._host.loops.values()
        owing = any(loop.blocked or loop.runtime.pending() for loop in loops)
        watching = any(loop.turns is not None and loop.turns.watches for loop in loops)
        poller.poll(_BLOCKED_NAP_MS if watching or (owing and not extra) else _NAP_MS)


def _rank_line(settings: Settings) -> RankLine | None:
    """Where ranks on other hosts find this one; None: there are none."""
    keys = RunKeys.from_plain(settings.keys)
    if keys is None or len(set(settings.rank_hosts)) < 2:
        return None
    return RankLine(settings.listen, keys, settings.rank_hosts, settings.life)


def _seek(settings: Settings) -> str:
    """The scheduler's address now."""
    whereabouts = Whereabouts.read(Path(settings.sockets)) if settings.sockets else None
    return whereabouts.control if whereabouts else ""


def preload(graph: Graph) -> None:
    """What the forkserver imports once, so that heavy workers start in milliseconds."""
    import torch

    torch.set_num_threads(1)
    loads = [operator.preload for operator in graph.operators.values() if not operator.light]
    for load in [*loads, weight_ports.preload] if graph.feedbacks else loads:
        with contextlib.suppress(Exception):  # `build` meets it again, in a worker that has a log
            load()


def environment(threads: int) -> dict[str, str]:
    """Environment for workers that share cores: thread pools of a fixed size that do not spin while
    they wait.
    """
    return {
        # the other check would spoil CUDA for what is forked afterwards
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    } | native.compilers_caches()


def _set_threads(threads: int) -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
