"""What kind of run a seed gets: its graph, its plan, and the empty run folder that it begins
with.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from dataflow.folder.ledger import Ledger
from dataflow.graph import Graph
from dataflow.history.describe import consumers, graph_facts, plan_facts
from dataflow.model import Model
from dataflow.planning.hosts import Devices, Host
from dataflow.planning.plan import Plan, plan
from operators.evaluate import Evaluate

from .actors import HeavyScorer, SimulatedGenerator, SimulatedPrompts, SimulatedScorer
from .trainer import SimulatedTrainer

MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
FEATURES = {"evaluation": 0.2, "scaling": 0.15, "resume": 0.2, "successor": 0.25, "filter": 0.05}
"""What a run may have beside its steps, and how many of all have it."""
HOSTS, HOSTED = "hosts", 0.15
"""The feature of a run over several hosts, which no other seed draws for, and how many of all have
it."""
SWAPS = "swaps"
"""The feature of a run whose scorer is swapped, which no seed draws: it has to be asked for."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What kind of run it is."""

    group_size: int
    prompts_per_step: int
    max_staleness: int
    steps: int
    generators: int
    checkpoint_every: int
    scorers: int
    """Replicas of a heavy scorer; 0: a light one, that shares its worker."""
    every_steps: int
    """Between rounds of evaluation; 0: there are none."""
    questions: int
    """Prompts of a round."""
    answers: int
    """Rollouts of each of them."""
    scales: bool
    """Whether replicas join and leave."""
    resumes: bool
    """Whether all of it dies at once and is taken up again."""
    succeeds: bool
    """Whether the scheduler dies alone, and another one takes the workers over."""
    filters: bool
    """Whether most groups are dropped."""
    swaps: bool = False
    """Whether the scorer is swapped."""
    hosts: int = 0
    """Machines that the workers sit on; 0: the scheduler's own."""

    @property
    def slots(self) -> int:
        """Rollouts that a generator draws at once: many groups travel together where most are
        dropped.
        """
        return 48 if self.filters else 4

    @classmethod
    def drawn(cls, random: Random, having: Collection[str] | None = None) -> Shape:
        """One of many; with these features, or None: with those that are drawn."""
        features = [name for name, share in FEATURES.items() if random.random() < share]
        features = features if having is None else list(having)
        evaluates, scales = "evaluation" in features, "scaling" in features
        heavy = random.random() < (0.5 if scales else 0.15)
        filters = "filter" in features
        return cls(
            group_size=random.choice((1, 2, 3)),
            prompts_per_step=random.choice((1, 2, 3)) * (6 if filters else 1),
            max_staleness=random.choice((0, 1, 2)),
            steps=2 if filters else random.randint(2, 5),
            generators=random.choice((1, 1, 2)),
            checkpoint_every=random.choice((1, 2, 3)),
            scorers=random.choice((1, 2)) if heavy and SWAPS not in features else 0,
            swaps=SWAPS in features,
            every_steps=random.choice((1, 2, 3)) * evaluates,
            questions=random.randint(1, 5) * evaluates,
            answers=random.choice((1, 2)) * evaluates,
            scales=scales,
            resumes="resume" in features,
            succeeds="successor" in features,
            filters=filters,
        )

    def over_hosts(self, random: Random) -> Shape:
        """The same over several hosts; where the scheduler dies, another one is started on one of
        them.
        """
        return replace(self, hosts=random.choice((2, 2, 3)))


def machines(count: int) -> list[Host]:
    """So many hosts."""
    return [Host(name=name, cpus=4) for name in "abc"[:count]]


@dataclass(frozen=True)
class Made:
    """What a run of some shape begins with."""

    graph: Graph
    plan: Plan
    ledger: bytes
    """An empty one."""
    files: dict[str, str]
    """What a run folder says of the run, by name."""


@functools.cache
def made(shape: Shape) -> Made:
    """Graph, plan and an empty run folder for runs of this shape."""
    graph, model = Graph("simulated"), Model("model")
    generator = SimulatedGenerator(model=model, group_size=shape.group_size, slots=shape.slots)
    scorer = HeavyScorer() if shape.scorers else SimulatedScorer()
    trainer = SimulatedTrainer(
        model=model,
        prompts_per_step=shape.prompts_per_step,
        checkpoint_every=shape.checkpoint_every,
        filters=shape.filters,
    )
    trainer(scorer(generator(graph.source(SimulatedPrompts()))))
    if shape.every_steps:
        questions = SimulatedPrompts(
            name="questions", rows=shape.questions, shuffle_seed=None, group_size=shape.answers
        )
        Evaluate(every_steps=shape.every_steps)(scorer(generator(graph.source(questions))))
    graph.feedback(trainer.weights, generator, max_staleness=shape.max_staleness)
    replicas = {"generator": shape.generators} | (
        {scorer.name: shape.scorers} if shape.scorers else {}
    )
    devices = Devices.of(machines(shape.hosts)) if shape.hosts else Devices(cpus=4)
    planned = plan(graph, devices, replicas=replicas, steps=shape.steps)
    facts = {
        "graph.json": graph_facts(graph),
        "config.json": {"seed": 0, "steps": shape.steps} | plan_facts(graph, planned),
    }
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder) / "ledger.db"
        Ledger.create(path, consumers(graph)).close()
        return Made(
            graph,
            planned,
            path.read_bytes(),
            {name: json.dumps(fact) for name, fact in facts.items()},
        )
