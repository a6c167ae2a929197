"""One worker process: hosts the operators that the plan puts together, and turns their loops until told to stop."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import structlog
import zmq

from dataflow.errors import DataflowError, DeadlineError
from dataflow.folder.whereabouts import Whereabouts
from dataflow.graph import Graph
from dataflow.node import Operator
from dataflow.planning.plan import Plan
from dataflow.system.clocks import AwakeClock
from dataflow.system.log import log_to
from dataflow.system.security import RunKeys
from dataflow.worker.cpu_watchdog import Asleep
from dataflow.worker.host import Host, Settings
from dataflow.worker.link import ALONE, Link
from dataflow.worker.ports import Ports

_NAP_MS = 100
_BLOCKED_NAP_MS = 5
_LEAST_PATIENCE_S = 5.0
"""Between two words of a scheduler that lives there may be so much."""


def main(graph: Graph, plan: Plan, plain: Mapping[str, Any]) -> int:
    """Run one worker; the exit status."""
    settings = Settings.from_plain(plain)
    name = f"{settings.worker}-{settings.replica}"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log_to(Path(settings.folder) / "logs" / f"{name}.log")
    if settings.attempt:
        print(f"---- {name}, attempt {settings.attempt} ----")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    left_alone, clock = threading.Event(), AwakeClock()
    link = Link(
        settings.control, name, orphaned=left_alone.set, found=left_alone.clear, seek=partial(_seek, settings),
        patience_s=max(_LEAST_PATIENCE_S, settings.limits.adopt_s), keys=RunKeys.from_plain(settings.keys), clock=clock,
    )  # fmt: skip
    who = {"name": name, "attempt": settings.attempt}
    worker = Worker(graph, plan, settings, link, left_alone, clock)
    link.start(worker.snapshot)
    try:
        worker.run()
    except BaseException as error:
        traceback.print_exc()
        link.send(
            "failed", **who, error=type(error).__name__, message=str(error), traceback=traceback.format_exc(),
            lasting=isinstance(error, DataflowError) and error.is_lasting,
        )  # fmt: skip
        link.close()
        return 1
    if worker.ended_alone:
        return ALONE
    link.send("bye", **who)
    link.close()
    return 0


class Worker:
    """The loop of one process.

    consumes: words from the scheduler; deliveries; weights
    produces: batches; a snapshot of itself for the beat; confirmations of words that ask for one
    waits for: any of its sockets, when no operator can go on
    unblocked by: a word, a delivery, a grant, a weight message, or the nap's end
    """

    def __init__(
        self, graph: Graph, plan: Plan, settings: Settings, link: Link, left_alone: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """left_alone: set while no scheduler is there. clock: as the link's."""
        self._settings, self._link, self._clock = settings, link, clock
        self._left_alone = left_alone or threading.Event()
        self._ends_at: float | None = None
        self._nodes = plan.workers[settings.worker]
        self._ports = Ports(graph, plan, self._nodes, settings, clock)
        self._host = Host(
            graph, plan, self._nodes, settings,
            writer_of=self._ports.writer_of, reader_of=self._ports.reader_of,
            device=lambda node: settings.device if plan.placements[node].gpus else "cpu", clock=clock,
        )  # fmt: skip
        self._process = psutil.Process()
        self._threads = max(plan.placements[node].threads for node in self._nodes)
        self._running = True
        self._name = f"{settings.worker}-{settings.replica}"
        self._who = {"name": self._name, "attempt": settings.attempt}
        self._report: dict[str, Any] = {}
        self._depths: dict[str, tuple[int, int]] = {}
        self._refreshed = 0.0
        self._early: list[dict[str, Any]] = []
        self._retiring: list[dict[str, Any]] = []
        self._drained = False
        self._state = "starting"
        self._turned = clock()
        self._asleep = Asleep()

    def run(self) -> None:
        """Start up, work, wind down."""
        _set_threads(self._threads)
        log = structlog.get_logger(worker=self._name)
        self._link.send("hello", **self._who, pid=os.getpid(), addresses=self._ports.open_inlets(self._host))
        self._host.build()
        addresses = self._wait_for("wire")["addresses"]
        outlets = self._ports.open_outlets(self._host, addresses)
        self._host.wire(self._ports.inlets, outlets)
        self._refresh(force=True)
        self._link.send("ready", **self._who)
        self._wait_for("start")
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
        self._ports.close()
        log.info("stopped")

    @property
    def ended_alone(self) -> bool:
        """Whether it has begun to end, or has ended, because nobody was there."""
        return self._ends_at is not None

    def snapshot(self) -> dict[str, Any]:
        """For the beat; called from the link's thread, reads only."""
        now = self._clock()
        turned_s = now - self._turned if self._state == "running" else 0.0
        return {
            **self._who, "state": self._state, "nodes": self._report, "edges": self._depths, "turned_s": turned_s,
            "asleep_s": self._asleep.look(turned_s, now), "at": self._host.at,
            "at_s": time.monotonic() - self._host.at_since, "drained": self._drained, "alone": self.ended_alone,
            "rss_bytes": self._process.memory_info().rss,
        }  # fmt: skip

    def _refresh(self, force: bool = False) -> None:
        """Renew what the beat carries, a few times a second."""
        now = time.monotonic()
        if force or now - self._refreshed > 0.1:
            self._refreshed = now
            self._report, self._depths = self._host.report(), self._ports.depths()
            self._drained = all(loop.ended for loop in self._host.loops.values()) and self._ports.drained

    def _hear(self) -> None:
        words, self._early = [*self._early, *self._link.words()], []
        for word in words:
            match word["kind"]:
                case "tell":
                    self._host.tell(word["node"], word["message"])
                case "stop":
                    self._running = False
                case "expect":
                    self._ports.expect(word["senders"])
                    self._confirm(word)
                case "over":
                    self._ports.over(word["senders"])
                case "add":
                    self._ports.add(word["receivers"])
                case "retire":
                    if word["ticket"] not in [known["ticket"] for known in self._retiring]:
                        self._ports.retire(word["receivers"])
                        self._retiring.append(word)

    def _part(self) -> None:
        """Confirm that receivers have gone, once they have."""
        for word in [word for word in self._retiring if self._ports.gone(word["receivers"])]:
            self._retiring.remove(word)
            self._confirm(word)

    def _end_alone(self) -> None:
        """No scheduler has come back: let trainers finish the step under way and write a checkpoint, then end.

        Where there is no trainer, the forkserver says when all others have ended, and any word that all goes on. A
        trainer that has begun to end is started again by whoever is the scheduler then."""
        operators = self._host.graph.operators
        trainers = [self._host.runtimes[node] for node in self._nodes if operators[node].trains]
        if self._ends_at is None:
            structlog.get_logger(worker=self._name).warning("no scheduler is there any more: coming to an end")
            self._ends_at = self._clock() + self._settings.limits.drain_s
            for node in [node for node in self._nodes if operators[node].trains]:
                self._host.tell(node, {"drain": True})
        elif not trainers and not self._left_alone.is_set():
            structlog.get_logger(worker=self._name).warning("a scheduler has spoken: going on")
            self._ends_at = None
            return
        if trainers and all(runtime.status().get("done") for runtime in trainers):
            self._running = False
        elif self._clock() > self._ends_at:
            os._exit(ALONE)

    def _confirm(self, word: Mapping[str, Any]) -> None:
        self._link.send("done", **self._who, ticket=word["ticket"])

    def _wait_for(self, kind: str) -> dict[str, Any]:
        """A word that comes when all workers have started."""
        deadline_s = self._settings.limits.start_s
        deadline = self._clock() + deadline_s
        while self._clock() < deadline:
            self._link.socket.poll(100)
            self._early += self._link.words()
            for word in self._early:
                if word["kind"] == "stop":
                    raise SystemExit(0)
                if word["kind"] == kind:
                    self._early.remove(word)
                    return word
        raise DeadlineError(
            f"worker '{self._settings.worker}' waited {deadline_s:.0f} s for the scheduler's word '{kind}' and did "
            f"not get it; another worker may not have started: see the other logs of this run, or raise Limits.start_s"
        )

    def _rest(self) -> None:
        """Sleep until something arrives; short where an operator owes rows or waits for credit."""
        extra = [item for runtime in self._host.runtimes.values() for item in runtime.waits()]
        poller = zmq.Poller()
        for socket in [self._link.socket, *self._ports.sockets(), *extra]:
            poller.register(socket, zmq.POLLIN)
        owing = any(loop.blocked or loop.runtime.pending() for loop in self._host.loops.values())
        began = time.monotonic()
        poller.poll(_BLOCKED_NAP_MS if owing and not extra else _NAP_MS)
        slept = time.monotonic() - began
        for loop in self._host.loops.values():
            loop.waited(slept)


def _seek(settings: Settings) -> str:
    """Where the scheduler is now."""
    found = Whereabouts.read(Path(settings.sockets)) if settings.sockets else None
    return found.control if found else ""


def preload(operators: Iterable[Operator]) -> None:
    """What the forkserver imports once, so that heavy workers start in milliseconds."""
    import torch

    torch.set_num_threads(1)
    for operator in operators:
        if not operator.light:
            with contextlib.suppress(Exception):  # `build` meets it again, in a worker that has a log
                operator.preload()


def environment(threads: int) -> dict[str, str]:
    """Environment for workers that share cores: thread pools of a fixed size that do not spin while they wait."""
    return {
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the other check would spoil CUDA for what is forked afterwards
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip


def _set_threads(threads: int) -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
