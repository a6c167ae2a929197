"""The scheduler at run time: starts the workers, tells them what to do, watches them, stops them.

No rollout and no weight passes through it.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import zmq

from dataflow import worker
from dataflow.conductor import Conductor, Word
from dataflow.errors import DeadlineError, RunError, WorkerDied
from dataflow.graph import Graph
from dataflow.host import Settings
from dataflow.nursery import Nursery
from dataflow.plan import Plan

_LAST_WORDS_S = 1.0
"""For what a worker said before it ended to arrive, whatever the others say meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Deadlines of the scheduler."""

    start_s: float = 300.0
    """From the first fork until every worker is ready: large models take long to load."""
    hang_s: float = 15.0
    """Without a heartbeat, a worker counts as hanging."""
    stop_s: float = 10.0
    """For workers to wind down before they are killed."""
    drain_s: float = 120.0
    """For the step under way and its checkpoint, after the user asked to stop."""


@dataclass
class WorkerState:
    """What the scheduler knows of one worker."""

    name: str
    nodes: list[str]
    pid: int = 0
    state: str = "forked"
    """forked | starting | ready | running | stopping | gone"""
    heard: float = 0.0
    """When it last said anything, on the scheduler's clock."""
    beat: Mapping[str, Any] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)


class Scheduler:
    """One run.

    consumes: hello, ready, beat, failed and bye from the workers; deaths from the forkserver
    produces: wire, start, tell and stop
    waits for: the workers, each wait with a deadline
    unblocked by: their messages; a death or a failure ends the run with its cause
    """

    def __init__(
        self, graph: Graph, plan: Plan, settings: Settings, *, limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Fork the forkserver; call this before the process has threads."""
        self.graph, self.plan, self.limits = graph, plan, limits or Limits()
        self._sockets = sockets = _make_folder()
        self._settings = settings
        self._clock = clock
        self.conductor = Conductor(graph, plan)
        self.workers: dict[str, WorkerState] = {}
        self._ended: set[str] = set()
        self._deadline = 0.0
        self._wish = False
        threads = max((p.threads for p in plan.placements.values()), default=1)
        self._nursery = Nursery(
            lambda plain: worker.main(graph, plan, plain),
            worker.environment(threads),
            worker.preload,
            clean_up=lambda: shutil.rmtree(sockets, ignore_errors=True),
        )
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._zmq.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{self._sockets}/control"
        self._router.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._nursery.fileno(), zmq.POLLIN)
        self._address = address

    def start(self, progress: Callable[[str], None] = lambda text: None) -> None:
        """Start every worker and wait until all are ready. Errors: RunError with the cause."""
        for name, replica, nodes in self.plan.processes():
            full = f"{name}-{replica}"
            self.workers[full] = WorkerState(full, nodes, heard=self._clock())
            settings = Settings(
                **{**self._settings.to_plain(), "worker": name, "replica": replica,
                   "control": self._address, "sockets": str(self._sockets)}
            )  # fmt: skip
            heavy = not all(self.graph.operators[node].light for node in nodes)
            self._nursery.spawn(full, settings.to_plain(), heavy)
        deadline = self._clock() + self.limits.start_s
        wired = False
        while not all(state.state == "ready" for state in self.workers.values()):
            self.turn(0.1)
            if not wired and all(state.pid and state.state != "forked" for state in self.workers.values()):
                wired = True
                self._broadcast({"kind": "wire", "addresses": self._addresses()})
            late = [state.name for state in self.workers.values() if state.state != "ready"]
            progress(", ".join(late))
            if self._clock() > deadline:
                raise DeadlineError(
                    f"the scheduler waited {self.limits.start_s:.0f} s for {late} to start; "
                    f"see their logs in {self._settings.folder}/logs"
                )
        self._say(self.conductor.start())
        self._broadcast({"kind": "start"})

    def turn(self, wait_s: float) -> None:
        """Take in what has come within `wait_s`; raises what ends the run."""
        ready = dict(self._poller.poll(int(wait_s * 1000)))
        if self._router in ready:
            while self._router.poll(0):
                name, data = self._router.recv_multipart()[:2]
                self._take(name.decode(), msgpack.unpackb(data))
        for event in self._nursery.events():
            self._note(event)
        if self._wish and not self.conductor.draining:
            self._drain()
        self._watch()

    def wish_drain(self) -> None:
        """Ask to finish the step under way, write a checkpoint and end; may be called from a signal handler."""
        self._wish = True

    def _drain(self) -> None:
        self._deadline = self._clock() + self.limits.drain_s
        self._say(self.conductor.drain())

    def close(self) -> None:
        """Stop the workers, by force after the limit; leave no process and no socket behind."""
        with contextlib.suppress(zmq.ZMQError):
            self._broadcast({"kind": "stop"})
        deadline = self._clock() + self.limits.stop_s
        with contextlib.suppress(RunError):
            while self._clock() < deadline and any(s.pid and s.state != "gone" for s in self.workers.values()):
                self._poller.poll(50)
                while self._router.poll(0):
                    self._router.recv_multipart()
                for event in self._nursery.events():
                    if event["event"] == "exited" and event["name"] in self.workers:
                        self.workers[event["name"]].state = "gone"
        self._nursery.close()
        self._router.close(0)
        self._zmq.term()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def kill(self, name: str, number: int) -> None:
        """Send a signal to a worker."""
        self._nursery.kill(name, number)

    def _take(self, name: str, message: Mapping[str, Any]) -> None:
        state = self.workers.get(name)
        if state is None:
            return
        state.heard = self._clock()
        kind = message["kind"]
        if kind == "hello":
            state.pid, state.state, state.addresses = message["pid"], "starting", message["addresses"]
        elif kind == "ready":
            state.state = "ready"
        elif kind == "beat":
            state.beat = message
            self._send(name, {"kind": "heard"})
            for node, report in message["nodes"].items():
                self._say(self.conductor.hear(node, report["status"]))
                if report["ended"] and node not in self._ended:
                    self._ended.add(node)
                    self._say(self.conductor.ended(node))
        elif kind == "failed":
            state.state = "gone"
            raise RunError(f"worker '{name}' failed: {message['message']}")
        elif kind == "bye":
            state.state = "stopping"

    def _note(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "started":
            return
        if event["event"] == "gone":
            raise WorkerDied(f"the forkserver ended unexpectedly; see logs in {self._settings.folder}/logs")
        state = self.workers.get(event["name"])
        if state is None or state.state in ("gone", "stopping"):
            return
        self._drain_messages(state.name)
        state.state = "gone"
        raise WorkerDied(
            f"worker '{state.name}' ({', '.join(state.nodes)}) ended {_how(event['status'])} while the run needed "
            f"it; see {self._settings.folder}/logs/{state.name}.log"
        )

    def _drain_messages(self, name: str) -> None:
        """A worker that failed says why before it ends; prefer that to the bare exit status."""
        deadline = self._clock() + _LAST_WORDS_S
        while self._clock() < deadline and self._router.poll(100):
            sender, data = self._router.recv_multipart()[:2]
            self._take(sender.decode(), msgpack.unpackb(data))

    def _watch(self) -> None:
        now = self._clock()
        for state in self.workers.values():
            if state.state in ("ready", "running") and now - state.heard > self.limits.hang_s:
                raise WorkerDied(
                    f"worker '{state.name}' ({', '.join(state.nodes)}) has not answered for {now - state.heard:.0f} s; "
                    f"see {self._settings.folder}/logs/{state.name}.log"
                )
        if self.conductor.draining and not self.conductor.over and now > self._deadline:
            raise DeadlineError(
                f"the scheduler waited {self.limits.drain_s:.0f} s for the step under way to end; it stops without "
                f"it, and the last checkpoint in {self._settings.folder} is good"
            )

    def _addresses(self) -> dict[str, list[str]]:
        """By edge, the addresses of its receivers, replica by replica."""
        found: dict[str, list[str]] = {}
        for state in self.workers.values():
            for edge, address in state.addresses.items():
                found.setdefault(edge, []).append(address)
        return found

    def _say(self, words: list[Word]) -> None:
        for word in words:
            for state in self.workers.values():
                if word.node in state.nodes:
                    self._send(state.name, {"kind": "tell", "node": word.node, "message": dict(word.message)})

    def _broadcast(self, message: Mapping[str, Any]) -> None:
        for name in self.workers:
            self._send(name, message)

    def _send(self, name: str, message: Mapping[str, Any]) -> None:
        self._router.send_multipart([name.encode(), msgpack.packb(message)])


def _make_folder() -> Path:
    """A folder of mode 0700 for the run's sockets and shared memory; it goes when the run ends, however it ends."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="dataflow-", dir=memory if os.access(memory, os.W_OK) else None))


def _how(status: int | None) -> str:
    if status is None:
        return "for an unknown reason"
    return f"by signal {-status}" if status < 0 else f"with status {status}"
