"""A table of the smallest graph that trains, for tests of what concerns its workers one by one."""

from typing import Any

from dataflow import Graph, Model
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import plan
from dataflow.scheduler.table import Table
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer


def small_table(**more: Any) -> Table:
    """Of prompts, generator and trainer, a worker each."""
    graph, model = Graph("test"), Model("policy")
    generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model)
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    return Table(graph=graph, plan=plan(graph, Devices(cpus=2)), **more)
