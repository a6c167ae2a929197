"""One simulated worker: what `dataflow.worker.worker.Worker` does with its host, ports and loops, without a process."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dataflow.node import Context
from dataflow.worker.host import Host, Settings
from dataflow.worker.ports import Ports
from dataflow.worker.worker import Worker
from transport.weights.layout.flat import FlatLayout
from transport.weights.reader import WeightReader
from transport.weights.writer import WeightWriter

from .laws import Broken, check
from .probe import Probe
from .process import Crash, Process

if TYPE_CHECKING:
    from .world import World

BEAT_S = 1.0


class Touching:
    """Something outside of the process: it may die before each call and after it."""

    def __init__(self, inner: Any, process: Process, done: Mapping[str, Callable[..., None]] | None = None) -> None:
        """done: by name, told of calls that have had their effect."""
        self._inner, self._process, self._done = inner, process, done or {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*values: Any, **named: Any) -> Any:
            self._process.point()
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


class Hearing(Worker):
    """The product's worker as far as it hears words and answers them; when it takes turns is the world's to say."""

    def __init__(self, host: Host, ports: Ports, link: Any, who: Mapping[str, Any]) -> None:
        self._host, self._ports, self._link, self._who = host, ports, link, who
        self._early: list[dict[str, Any]] = []
        self._retiring: list[dict[str, Any]] = []
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


class SimulatedHost(Host):
    """The host, with a virtual clock, a probe in place of the log, and crashes around ledger and folder."""

    def __init__(self, *values: Any, process: Process, probe: Probe, **named: Any) -> None:
        super().__init__(*values, **named)
        self.probe = probe
        if self.ledger is not None:
            process.on_death.append(self.ledger._db.close)
        told = {"commit_step": probe.committed, "drop": probe.gave_up, "commit_round": probe.recorded_round}
        self.ledger = Touching(self.ledger, process, told)  # type: ignore[assignment]
        self.folder = Touching(self.folder, process, {"write_evaluation": probe.judges})  # type: ignore[assignment]

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
        settings = Settings.from_plain({**plain, "sockets": ""})
        check(settings.attempt > self.process.attempt, f"'{self.name}' restarts as attempt {settings.attempt}")
        self.host = self.ports = None
        self._words: deque[dict[str, Any]] = deque()
        self.weights: list[Any] = []
        self.state = "starting"
        life = self._life(settings)
        self.process.start(lambda: self._turn(life), settings.attempt)
        self.out = self._exchange.connect(self.name, self._hear)
        self.process.on_death.append(self._ended)
        self._beat(self.process.attempt)

    def _turn(self, life: Iterator[bool]) -> bool:
        world = self.world
        world.current = self.process
        try:
            moved = next(life)
        except StopIteration:
            self.send("bye")
            self.process.die()
            return False
        except Exception as error:  # nothing in this world should fail
            raise Broken(f"'{self.name}' failed: {type(error).__name__}: {error}") from error
        finally:
            world.current = None
        if self.ports is not None:
            for edge, receiver in self.ports.inlets.items():
                depth, most = receiver.depth[0], receiver._inbox.capacity.rows
                check(depth <= most, f"edge {edge} holds {depth} rows of {most}")
                check(not receiver.refused, f"edge {edge} refused a message of a sound sender")
        return moved

    def _life(self, settings: Settings) -> Iterator[bool]:
        """What dataflow.worker.worker.Worker.run does."""
        world, process = self.world, self.process
        nodes = world.plan.workers[settings.worker]
        ports = self.ports = Ports(world.graph, world.plan, nodes, settings)
        site = world.site.of(process)

        def writer_of(trainer: str) -> Any:
            def opened(tensors: Mapping[str, Any]) -> WeightWriter:
                end = WeightWriter(FlatLayout.of(tensors), site, clock=world.clock)
                self.weights.append(end)
                return end

            return opened

        def reader_of(trainer: str, reader: str) -> Any:
            def opened(tensors: Mapping[str, Any]) -> WeightReader:
                end = WeightReader(site, f"{reader}-{settings.replica}", clock=world.clock, attempt=settings.attempt)
                end.attach(tensors)
                self.weights.append(end)
                return end

            return opened

        host = self.host = SimulatedHost(
            world.graph, world.plan, nodes, settings, writer_of=writer_of, reader_of=reader_of,
            process=process, probe=Probe(world, process),
        )  # fmt: skip
        self.send("hello", pid=1, addresses=ports.open_inlets(host))
        yield True
        host.build()
        while (word := self._take("wire")) is None:
            yield False
        host.wire(ports.inlets, ports.open_outlets(host, word["addresses"]))
        worker = Hearing(host, ports, self, {})
        self.send("ready")
        while self._take("start") is None:
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

    def _snapshot(self) -> dict[str, Any]:
        host, ports = self.host, self.ports
        if host is None or ports is None or not host.loops:
            return {"nodes": {}, "edges": {}, "drained": False}
        drained = all(loop.ended for loop in host.loops.values()) and ports.drained
        return {"nodes": host.report(), "edges": ports.depths(), "drained": drained}

    def _take(self, kind: str) -> dict[str, Any] | None:
        found = next((word for word in self._words if word["kind"] in (kind, "stop")), None)
        if found is not None and found["kind"] == "stop":
            self.process.die()
            raise Crash(self.name)
        if found is not None:
            self._words.remove(found)
        return found

    def _hear(self, word: dict[str, Any]) -> None:
        if "kind" in word:  # it is no answer to a command
            self._words.append(word)
            self.process.wake()

    # As dataflow.worker.link.Link

    def words(self) -> list[dict[str, Any]]:
        """What was said since the last call."""
        heard, self._words = list(self._words), deque()
        return heard

    def send(self, kind: str, **values: Any) -> None:
        """Tell the scheduler something."""
        self.out.send((self.name, {"kind": kind, "name": self.name, "attempt": self.process.attempt, **values}))

    def _beat(self, attempt: int) -> None:
        if self.process.alive and self.process.attempt == attempt:
            if self.world.clock.now >= self.process.stopped_until:
                self.send("beat", state=self.state, turned_s=0.0, rss_bytes=0, **self._snapshot())
            self.world.clock.after(BEAT_S, lambda: self._beat(attempt))

    def _ended(self) -> None:
        self.world.say(self.name, f"ends as attempt {self.process.attempt}")
        self.state = "none"
        self._exchange.hang_up(self.name)
        self.world.room.forks.ended(self.name)

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
        owed = {} if self.ports is None else {name: out.unacknowledged for name, out in self.ports._outlets.items()}
        depths = {} if self.ports is None else {name: end.depth[0] for name, end in self.ports.inlets.items()}
        return f"{self.name} ({self.state}): {nodes}, owed {owed}, holds {depths}"
