"""The scheduler at run time: starts the workers, tells them what to do, watches them, stops them.

No rollout and no weight passes through it.
"""

import contextlib
import dataclasses
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
from dataflow.command import answer
from dataflow.conductor import Conductor, Word
from dataflow.errors import DeadlineError, GraphError, RunError, WorkerDied
from dataflow.graph import Graph
from dataflow.host import Settings
from dataflow.nursery import Nursery
from dataflow.plan import Plan
from dataflow.scaling import Fork, Order, Say, Scaling, Tell

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
    """forked | starting | ready | stopping | left (in order, while the run goes on) | gone"""
    heard: float = 0.0
    """When it last said anything, on the scheduler's clock."""
    beat: Mapping[str, Any] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)


class Scheduler:
    """One run.

    consumes: hello, ready, done, beat, failed and bye from the workers; deaths from the forkserver; commands
    produces: wire, start, tell, stop and the words of `scaling`; answers to commands
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
        self.scaling = Scaling(graph, plan)
        self.said: list[str] = []
        """What the user may want to read, oldest first; whoever shows it takes it out."""
        self._schedule = sorted(plan.scale.items())
        self._join_deadline = 0.0
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
        self.address = address
        """Where commands are taken, too."""

    def start(self, progress: Callable[[str], None] = lambda text: None) -> None:
        """Start every worker and wait until all are ready. Errors: RunError with the cause."""
        for name, replica, nodes in self.plan.processes():
            self._spawn(name, replica, device=self.plan.placements[nodes[0]].device(replica))
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
        self._obey(self.scaling.begin({state.name: state.addresses for state in self.workers.values()}))

    def scale(self, node: str, replicas: int) -> None:
        """Let processes of a node join, or leave when they have done what they have, until it has so many.

        Raises GraphError when the node cannot have them, RunError when the run is ending.
        """
        self._scale({node: replicas})

    @property
    def beats(self) -> dict[str, Mapping[str, Any]]:
        """The last that every worker said of itself, those that left included; `member` tells how it is in the run."""
        return {name: {**state.beat, "member": self.scaling.state(name)} for name, state in self.workers.items()}

    def turn(self, wait_s: float) -> None:
        """Take in what has come within `wait_s`; raises what ends the run."""
        ready = dict(self._poller.poll(int(wait_s * 1000)))
        if self._router in ready:
            while self._router.poll(0):
                name, data = self._router.recv_multipart()[:2]
                self._take(name.decode(), msgpack.unpackb(data))
        for event in self._nursery.events():
            self._note(event)
        self._keep_to_schedule()
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
            running = [s for s in self.workers.values() if s.pid and s.state != "left"]
            while self._clock() < deadline and any(s.state != "gone" for s in running):
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
            self._send(name, answer(message, self._command))
            return
        state.heard = self._clock()
        kind = message["kind"]
        if kind == "hello":
            state.pid, state.state, state.addresses = message["pid"], "starting", message["addresses"]
            if name == self.scaling.joining:
                self._obey(self.scaling.hello(name, state.addresses))
        elif kind == "ready":
            state.state = "ready"
            if name == self.scaling.joining:
                self._obey(self.scaling.ready(name))
        elif kind == "done":
            self._obey(self.scaling.confirmed(message["ticket"]))
        elif kind == "beat":
            state.beat = message
            self._send(name, {"kind": "heard"})
            if message["drained"]:
                self._obey(self.scaling.drained(name))
            for node, report in message["nodes"].items():
                self._say(self.conductor.hear(node, report["status"]))
                if report["ended"] and node not in self._ended and self._all_ended(node):
                    self._ended.add(node)
                    self._say(self.conductor.ended(node))
        elif kind == "failed":
            state.state = "gone"
            raise RunError(f"worker '{name}' failed: {message['message']}")
        elif kind == "bye" and state.state != "left":
            state.state = "stopping"

    def _note(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "started":
            return
        if event["event"] == "gone":
            raise WorkerDied(f"the forkserver ended unexpectedly; see logs in {self._settings.folder}/logs")
        state = self.workers.get(event["name"])
        if state is not None and event["status"] == 0 and self.scaling.leaves(state.name):
            state.state = "left"
            self._obey(self.scaling.exited(state.name))
            return
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
        name = self.scaling.joining
        if name is not None and now > self._join_deadline:
            raise DeadlineError(
                f"the scheduler waited {self.limits.start_s:.0f} s for '{name}' to join, which waits for "
                f"{self.scaling.missing()}; see {self._settings.folder}/logs/{name}.log, or raise Limits.start_s"
            )

    @property
    def _ending(self) -> bool:
        return self.conductor.draining or self.conductor.over

    def _spawn(self, worker: str, replica: int, **more: Any) -> None:
        """Ask the forkserver for one process of a worker."""
        full, nodes = f"{worker}-{replica}", self.plan.workers[worker]
        self.workers[full] = WorkerState(full, nodes, heard=self._clock())
        settings = dataclasses.replace(
            self._settings, worker=worker, replica=replica, control=self.address, sockets=str(self._sockets), **more
        )
        heavy = not all(self.graph.operators[node].light for node in nodes)
        self._nursery.spawn(full, settings.to_plain(), heavy)

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
                    self._send(order.to, order.word)
                case Tell():
                    self.said.append(order.text)

    def _all_ended(self, node: str) -> bool:
        reports = [s.beat.get("nodes", {}).get(node) for s in self.workers.values() if node in s.nodes]
        return all(report and report["ended"] for report in reports)

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
