"""A graph whose trainer's ranks may be on several hosts, to be planned."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dataflow import Graph, Model
from dataflow.node import Split, Traits
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

POLICY = Model("policy")


@dataclass(frozen=True, eq=False)
class Spreading(FakeTrainer):
    """A trainer whose ranks may be on several hosts."""

    tensor_parallel: int = 1
    dp_replicate: int = 1

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            split=Split(tensor_parallel=self.tensor_parallel, dp_replicate=self.dp_replicate),
        )

    def follower(self, context: Any, told: Mapping[str, Any]) -> Callable[[int, int], int]:
        raise AssertionError("it is planned alone")


def build(trainer: FakeTrainer | None = None, **knobs: int) -> Graph:
    graph, generator = Graph("test"), FakeGenerator(model=POLICY)
    trainer = trainer or Spreading(name="trainer", model=POLICY, **knobs)
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    return graph
