"""The run that is played: its graph, its hosts, and what passes between the two processes before it
begins.
"""

import json
from dataclasses import dataclass
from typing import Any

from dataflow import Graph, Model
from dataflow.planning.hosts import Devices, Host
from dataflow.planning.plan import Plan, plan
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

PER_HOST = 8
"""Workers."""
EDGES = {"generator": "prompts>generator:prompts", "trainer": "generator>trainer:prompts"}
"""By worker, the edge that ends there."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a run."""

    workers: int
    """That speak to the scheduler: of a replica of several ranks the first."""
    ranks: int = 0
    """Of generators of 8 ranks each and of a trainer that has half of all; 0: a worker is one."""

    @classmethod
    def of_ranks(cls, ranks: int) -> "Size":
        """The run that has so many: prompts, a trainer, generators."""
        return cls(workers=2 + ranks // 2 // PER_HOST, ranks=ranks)

    @property
    def hosts(self) -> list[Host]:
        """So many as their ranks need."""
        count = max(1, (self.ranks or self.workers) // PER_HOST)
        return [Host(name=f"h{number}", cpus=PER_HOST) for number in range(count)]

    @property
    def name(self) -> str:
        """For a row."""
        return f"{self.ranks} ranks" if self.ranks else f"{self.workers} workers"


def graph() -> Graph:
    """Prompts, generators, a trainer."""
    controller, model = Graph("controller"), Model("policy")
    generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model)
    trainer(generator(controller.source(FakePrompts())))
    controller.feedback(trainer.weights, generator, max_staleness=1)
    return controller


def planned(controller: Graph, size: Size) -> Plan:
    """All but two are generators."""
    return plan(controller, Devices.of(size.hosts), replicas={"generator": size.workers - 2})


@dataclass(frozen=True)
class Call:
    """What the played hosts are told on their standard input: plain values, keys included."""

    address: str
    keys: str
    hosts: list[str]
    built: dict[str, Any]
    folder: str

    def to_line(self) -> str:
        """One line of JSON."""
        return json.dumps(vars(self))
