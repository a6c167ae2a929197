"""A whole run in one process: the real scheduler, hosts, loops and transports among simulated workers."""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from dataflow import control, finished, ports
from dataflow.control import Limits, Scheduler
from dataflow.graph import Graph
from dataflow.host import Settings
from dataflow.ledger import Ledger
from dataflow.model import Model
from dataflow.plan import Devices, Plan, plan
from dataflow.records import GROUP_ID
from dataflow.recovery import Patience
from dataflow.run_folder import RunFolder

from .actors import SimulatedGenerator, SimulatedPrompts, SimulatedScorer
from .clock import Clock
from .desk import SimulatedDesk
from .laws import check
from .nemesis import Nemesis, Trouble
from .network import SimulatedNetwork, Weather
from .process import Process
from .trainer import SimulatedTrainer
from .weights import Site
from .worker import SimulatedWorker

LONGEST_S = 120.0
"""Virtual seconds within which a run must be over."""
MOST_EVENTS = 100_000
MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What kind of run it is."""

    group_size: int
    prompts_per_step: int
    max_staleness: int
    steps: int
    generators: int
    checkpoint_every: int

    @classmethod
    def drawn(cls, random: Random) -> Shape:
        """One of many."""
        return cls(
            group_size=random.choice((1, 2, 3)), prompts_per_step=random.choice((1, 2, 3)),
            max_staleness=random.choice((0, 1, 2)), steps=random.randint(2, 5), generators=random.choice((1, 1, 2)),
            checkpoint_every=random.choice((1, 2, 3)),
        )  # fmt: skip


@functools.cache
def made(shape: Shape) -> tuple[Graph, Plan, bytes]:
    """Graph, plan and an empty ledger for runs of this shape."""
    graph, model = Graph("simulated"), Model("model")
    generator = SimulatedGenerator(model=model, group_size=shape.group_size)
    trainer = SimulatedTrainer(
        model=model, prompts_per_step=shape.prompts_per_step, checkpoint_every=shape.checkpoint_every
    )
    trainer(SimulatedScorer()(generator(graph.source(SimulatedPrompts()))))
    graph.feedback(trainer.weights, generator, max_staleness=shape.max_staleness)
    planned = plan(graph, Devices(cpus=4), replicas={"generator": shape.generators}, steps=shape.steps)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder) / "ledger.db"
        Ledger.create(path, {"trainer": ["prompts"]}).close()
        return graph, planned, path.read_bytes()


class World:
    """One run of one seed."""

    def __init__(self, seed: int, *, keep_log: bool = False) -> None:
        self.seed, self.random, self.clock = seed, Random(seed), Clock()
        self.log: list[str] | None = [] if keep_log else None
        random = self.random
        self.shape = Shape.drawn(random)
        self.one_generator = self.shape.generators == 1
        self.graph, self.plan, self._ledger = made(self.shape)
        weather = Weather(delay_s=random.choice((1e-4, 1e-3, 1e-2)), slow=random.choice((0.0, 0.02, 0.1)), damage=0.0)
        self.network = SimulatedNetwork(self.clock, random, weather)
        self.site = Site(self.network)
        self.disk: dict[int, int] = {0: 1}
        """Checkpoints: what the weights of a step are; no crash takes them."""
        self.contents: dict[int, int] = {}
        """Of every version that was published."""
        self.newest_committed = 0
        self.found = 0
        """Version that the last trainer found recorded when it started."""
        self.trained: dict[int, int] = {}
        """Step by group, on the line that survives."""
        self.given_up: dict[int, int] = {}
        """The same of groups that were given up."""
        self.started: dict[int, int] = {}
        self.durable: set[int] = set()
        """Groups whose rollouts were finished and written down."""
        self.workers: dict[str, SimulatedWorker] = {}
        self.folder: RunFolder
        self.desk: SimulatedDesk
        self.current: Process | None = None
        """Whose turn it is."""
        self._checked = 0

    def say(self, who: str, what: str) -> None:
        """A line of the log."""
        if self.log is not None:
            self.log.append(f"{self.clock.now:10.5f}  {who}: {what}")

    def run(self) -> None:
        """From the scheduler's start to its end; raises Broken."""
        torch.set_num_threads(1)
        path = Path(tempfile.mkdtemp(prefix="simulation-", dir=MEMORY))
        try:
            for below in ("logs", "rollouts", "checkpoints"):
                (path / below).mkdir()
            (path / "ledger.db").write_bytes(self._ledger)
            self.folder = RunFolder.open(path)
            self.ledger = Ledger.open(self.folder.ledger)
            with self._product():
                self._run(str(path))
        finally:
            for worker in self.workers.values():
                worker.process.die()
            self.ledger.close()
            shutil.rmtree(path, ignore_errors=True)

    def _run(self, folder: str) -> None:
        random = self.random
        settings = Settings(folder=folder, seed=self.seed, steps=self.shape.steps)
        limits = Limits(hang_s=4.0, patience=Patience(of_one=50))
        self.desk = SimulatedDesk(self.network, Path(folder), self._step, self._spawn, self._kill)
        scheduler = Scheduler(self.graph, self.plan, settings, limits=limits, clock=self.clock)
        scheduler.start()
        self.say("scheduler", "all are ready")
        processes = [worker.process for worker in self.workers.values()]
        Nemesis(
            self.clock,
            random,
            self.network,
            processes,
            Trouble(hang_s=8.0, over_s=random.choice((0.4, 1.0, 3.0))),
            self.say,
        )
        while not scheduler.conductor.over:
            scheduler.turn(0.25)
        self.say("scheduler", "the run is over")
        scheduler.close()
        self._final_laws()

    def _step(self) -> None:
        check(self.clock.step(), "the world stands still", self.who_waits)
        check(self.clock.events < MOST_EVENTS, "messages go back and forth without end", self.who_waits)
        check(self.clock.now < LONGEST_S, f"the run is not over after {LONGEST_S:.0f} s", self.who_waits)
        if self.newest_committed != self._checked:
            self._checked = self.newest_committed
            self._ledger_laws()

    def _ledger_laws(self) -> None:
        counts = self.ledger.counts("trainer")
        check(counts.missing == 0, f"the ledger lost count: {counts}")
        check(
            counts.trained == len(self.trained),
            f"{len(self.trained)} groups were trained, but not by {counts}",
        )

    def _final_laws(self) -> None:
        self._ledger_laws()
        counts, shape = self.ledger.counts("trainer"), self.shape
        check(self.newest_committed == shape.steps, f"{self.newest_committed} of {shape.steps} steps were made")
        check(counts.trained == shape.steps * shape.prompts_per_step, f"not all was trained: {counts}")
        left = self.ledger.in_flight("prompts")
        check(not left, f"groups {left} have no outcome at the end")

    def _spawn(self, name: str, settings: Mapping[str, Any]) -> None:
        worker = self.workers.setdefault(name, SimulatedWorker(self, name))

        def fork() -> None:
            self.desk.note({"event": "started", "name": name, "pid": 1, "status": None})
            self.say(name, f"starts as attempt {settings['attempt']}")
            worker.start(settings)

        self.clock.after(0.02 * self.random.random(), fork)

    def _kill(self, name: str) -> None:
        self.say(name, "is killed by the scheduler")
        self.workers[name].process.die()

    @contextlib.contextmanager
    def _product(self) -> Iterator[None]:
        """The product's sockets and desk are those of this world for a while."""
        append = finished.Finished.append

        def appended(self_: finished.Finished, rows: Any) -> None:
            append(self_, rows)
            self.durable.update(rows.column(GROUP_ID).to_pylist())
            assert self.current is not None
            self.current.point()

        def network(**_: Any) -> Any:
            assert self.current is not None
            return self.network.of(self.current)

        with _replaced(
            (ports, "SocketNetwork", network),
            (control, "Desk", lambda *_, **__: self.desk), (finished.Finished, "append", appended),
        ):  # fmt: skip
            yield

    def who_waits(self) -> str:
        """Every worker, what its nodes say, what it is owed and what it holds."""
        return "\n  ".join(["", *(worker.waits() for worker in self.workers.values())])


@contextlib.contextmanager
def _replaced(*places: tuple[Any, str, Callable[..., Any]]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, new in places:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, old in before:
            setattr(owner, name, old)
