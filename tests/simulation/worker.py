"""One simulated worker: what `dataflow.worker.worker.Worker` does with its host, ports and loops,
without a process.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from dataflow.runtime import Context
from dataflow.scheduler.events import Received
from dataflow.worker.host import NodeLoops, Settings
from dataflow.worker.messages import (
    TO_SCHEDULER,
    Bye,
    Failed,
    FromWorker,
    Heartbeat,
    Hello,
    NodeReport,
    Ready,
    RetireReceivers,
    Start,
    Stop,
    ToWorker,
    Wire,
)
from dataflow.worker.ports import Ports
from dataflow.worker.worker import Worker
from transport.life import Life
from transport.weights.layout.flat import FlatLayout
from transport.weights.reader import WeightReader
from transport.weights.writer import WeightWriter

from .guests import UNBUILT
from .laws import Broken, check
from .probe import Probe
from .process import Crash, Process

if TYPE_CHECKING:
    from .world import World

HEARTBEAT_S = 1.0
M = TypeVar("M", Wire, Start)


class Touching:
    """Something outside of the process: it may die before each call and after it."""

    def __init__(
        self,
        inner: Any,
        process: Process,
        done: Mapping[str, Callable[..., None]] | None = None,
        pass_: Callable[[Process], None] = lambda process: None,
    ) -> None:
        """done: by name, told of calls that have had their effect. pass_: whether the process may
        call; raises.
        """
        self._inner, self._process, self._done, self._pass = inner, process, done or {}, pass_

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*values: Any, **named: Any) -> Any:
            self._process.point()
            self._pass(self._process)
            result = found(*values, **named)
            if name in self._done:
                self._done[name](*values, **named)
            self._process.point()
            return result

        return call

    def __enter__(self) -> Touching:
        return self

    def __exit__(self, *_: object) -> None:
        self._inner.close()


class TouchingFolder(Touching):
    """A run folder, whose files of rollouts are outside too."""

    def rollouts_of(self, node: str | None = None) -> Touching:
        return Touching(self._inner.rollouts_of(node), self._process, self._done, self._pass)


class Hearing(Worker):
    """The product's worker as far as it hears messages and answers them; when it takes turns is the
    world's to say.
    """

    def __init__(self, host: NodeLoops, ports: Ports, link: Any, settings: Settings) -> None:
        self._host, self._ports, self._link, self._settings = host, ports, link, settings
        self._early: list[ToWorker] = []
        self._retiring: list[RetireReceivers] = []
        self._running = True

    @property
    def runs(self) -> bool:
        """Whether it was not told to stop."""
        return self._running

    def hear(self) -> None:
        """Do what the scheduler said."""
        self._hear()

    def part(self) -> None:
        """Say which receivers have gone."""
        self._part()


class SimulatedHost(NodeLoops):
    """The host, with a virtual clock, a probe in place of the log, and crashes around ledger and
    folder.
    """

    def __init__(self, *values: Any, process: Process, probe: Probe, **named: Any) -> None:
        super().__init__(*values, **named)
        self.probe = probe
        if self.ledger is not None:
            process.on_death.append(self.ledger._db.close)
        told = {
            "commit_step": probe.committed,
            "drop": probe.gave_up,
            "commit_round": probe.recorded_round,
        }
        self.ledger = Touching(self.ledger, process, told, probe.may_write)  # type: ignore[assignment]
        told_of = {"write_evaluation": probe.judges}
        self.folder = TouchingFolder(self.folder, process, told_of, probe.may_write)  # type: ignore[assignment]

    def _context(self, name: str) -> Context:
        return dataclasses.replace(super()._context(name), clock=self.probe.clock, log=self.probe)


class SimulatedWorker:
    """One name, over all its attempts."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self._exchange = world, name, world.room.exchange
        pace_s = world.random.choice((2e-4, 2e-3, 1e-2))
        self.process = Process(name, world.clock, world.random, pace_s=pace_s)
        self.host: SimulatedHost | None = None
        self.ports: Ports | None = None
        self.state = "none"

    def start(self, plain: Mapping[str, Any]) -> None:
        """An attempt begins."""
        settings = msgspec.convert({**plain, "sockets": ""}, Settings)
        check(
            settings.life.attempt > self.process.attempt,
            f"'{self.name}' restarts as attempt {settings.life.attempt}",
        )
        check(
            not self.process.alive,
            f"'{self.name}' starts beside its attempt {self.process.attempt}",
        )
        self.host = self.ports = None
        self._messages: deque[ToWorker] = deque()
        self.weights: list[Any] = []
        self.state = "starting"
        turns = self._turns(settings)
        self.process.host = settings.host
        self.process.start(lambda: self._turn(turns), settings.life.attempt)
        self.out = self._exchange.connect(self.name, settings.host, self._hear)
        self.process.on_death.append(self._ended)
        self.life = settings.life
        self._heartbeat(settings.life)

    def _turn(self, turns: Iterator[bool]) -> bool:
        world = self.world
        if world.room.waits(self.process):
            return False
        world.current = self.process
        try:
            moved = next(turns)
        except StopIteration:
            self.send(Bye(life=self.life))
            self.process.die()
            return False
        except Exception as error:
            # nothing in this world should fail, but what is done by one that is nobody's
            if world.room.is_fenced(self.process):
                self.process.die()
                return False
            raise Broken(f"'{self.name}' failed: {type(error).__name__}: {error}") from error
        finally:
            world.current = None
        if self.ports is not None:
            for edge, receiver in self.ports._receivers.items():
                depth, most = receiver.depth[0], receiver._inbox.capacity.rows
                check(depth <= most, f"edge {edge} holds {depth} rows of {most}")
                check(not receiver.refused, f"edge {edge} refused a message of a sound sender")
        return moved

    def _turns(self, settings: Settings) -> Iterator[bool]:
        """What dataflow.worker.worker.Worker.run does."""
        world, process = self.world, self.process
        nodes = world.plan.workers[settings.worker]
        ports = self.ports = Ports(world.graph, world.plan, nodes, settings)
        site = world.site.of(process)
        yield from self._loads()

        def writer_of(trainer: str, refresh: Any) -> Any:
            def opened(tensors: Mapping[str, Any]) -> WeightWriter:
                end = WeightWriter(FlatLayout.of(tensors), site, clock=world.clock)
                self.weights.append(end)
                return end

            return opened

        def reader_of(trainer: str, reader: str) -> Any:
            def opened(tensors: Mapping[str, Any]) -> WeightReader:
                end = WeightReader(
                    site,
                    f"{reader}-{settings.replica}",
                    clock=world.clock,
                    attempt=settings.life.attempt,
                )
                end.attach(tensors)
                self.weights.append(end)
                return end

            return opened

        host = self.host = SimulatedHost(
            world.graph,
            world.plan,
            nodes,
            settings,
            writer_of=writer_of,
            reader_of=reader_of,
            process=process,
            probe=Probe(world, process),
        )
        self.send(Hello(life=settings.life, pid=1, addresses=ports.open_inlets(host)))
        yield True
        while (wire := self._take(Wire)) is None:
            yield False
        yield from self._loads()
        host.build()
        host.wire(ports.inlets, ports.open_outlets(host, wire.addresses))
        if any(swap.reference == UNBUILT for swap in settings.swaps):
            self.send(Failed(life=settings.life, message="it is not to be built", lasting=True))
            yield True
            self.process.die()
            raise Crash(self.name)
        host.record_swaps()
        worker = Hearing(host, ports, self, settings)
        self.send(Ready(life=settings.life))
        while self._take(Start) is None:
            yield False
        self.state = "running"
        while True:
            worker.hear()
            if not worker.runs:
                host.close()
                ports.close()
                return
            for end in self.weights:
                end.poll()
            moved = host.turn()
            worker.part()
            yield moved

    def _loads(self) -> Iterator[bool]:
        """What takes a while when it starts; over hosts, where links may come back meanwhile."""
        world = self.world
        if world.shape.hosts and self.process.attempt:
            until = world.clock.now + world.random.choice((0.0, 0.5, 3.0)) * world.random.random()
            world.clock.after(until - world.clock.now, self.process.wake)
            while world.clock.now < until:
                yield False

    def _facts(self) -> dict[str, Any]:
        host, ports = self.host, self.ports
        if host is None or ports is None or not host.loops:
            return {"nodes": {}}
        drained = all(loop.ended for loop in host.loops.values()) and ports.drained
        nodes = {node: NodeReport(**report) for node, report in host.report().items()}
        return {"nodes": nodes, "edges": ports.depths(), "drained": drained}

    def _take(self, kind: type[M]) -> M | None:
        for message in self._messages:
            if isinstance(message, Stop):
                self.process.die()
                raise Crash(self.name)
            if isinstance(message, kind):
                self._messages.remove(message)
                return message
        return None

    def _hear(self, message: ToWorker) -> None:
        self._messages.append(message)
        self.process.wake()

    # As dataflow.worker.link.SchedulerLink

    def messages(self) -> list[ToWorker]:
        """What was sent since the last call."""
        heard, self._messages = list(self._messages), deque()
        return heard

    def send(self, message: FromWorker) -> None:
        """Send a message to the scheduler."""
        self.out.send(
            Received(
                self.name, TO_SCHEDULER.decode(TO_SCHEDULER.encode(message)), self.process.host
            )
        )

    def _heartbeat(self, life: Life) -> None:
        if self.process.alive and self.life == life:
            if self.world.clock.now >= self.process.stopped_until:
                self.send(Heartbeat(life=life, state=self.state, **self._facts()))
            self.world.clock.after(HEARTBEAT_S, lambda: self._heartbeat(life))

    def _ended(self) -> None:
        self.world.say(self.name, f"ends as attempt {self.process.attempt}")
        self.state = "none"
        self._exchange.hang_up(self.name, self.process.host)
        self.world.room.forks.ended(self.name, self.process.host)

    def waits(self) -> str:
        """What it says of itself."""
        if self.host is None or not self.process.alive:
            return f"{self.name} is {self.state}"
        nodes = {
            node: (
                loop.runtime.status(),
                "blocked" if loop.blocked else "",
                "ended" if loop.ended else "",
                len(loop.acknowledgements),
            )
            for node, loop in self.host.loops.items()
        }
        owed = (
            {}
            if self.ports is None
            else {name: out.unacknowledged for name, out in self.ports.outlets.items()}
        )
        depths = (
            {}
            if self.ports is None
            else {name: end.depth[0] for name, end in self.ports.inlets.items()}
        )
        return f"{self.name} ({self.state}): {nodes}, owed {owed}, holds {depths}"
