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


def hosts(workers: int) -> list[Host]:
    """So many as they need."""
    return [Host(name=f"h{number}", cpus=PER_HOST) for number in range(max(1, workers // PER_HOST))]


def graph() -> Graph:
    """Prompts, generators, a trainer."""
    controller, model = Graph("controller"), Model("policy")
    generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model)
    trainer(generator(controller.source(FakePrompts())))
    controller.feedback(trainer.weights, generator, max_staleness=1)
    return controller


def planned(controller: Graph, workers: int) -> Plan:
    """All but two are generators."""
    return plan(controller, Devices.of(hosts(workers)), replicas={"generator": workers - 2})


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
