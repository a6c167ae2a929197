"""How long a graph of 1,000 operators takes to build, check and plan: python -m
bench.graph_size.
"""

import argparse
import time

from dataflow import Graph, Model, scorer
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import plan
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer


@scorer
def length(completion: str) -> int:
    """Characters."""
    return len(completion)


def measure(operators: int) -> dict[str, float]:
    """Seconds to build a chain of so many operators, to check it, and to plan it."""
    began = time.perf_counter()
    graph = Graph("large")
    stream = FakeGenerator(model=Model("policy"))(graph.source(FakePrompts()))
    for number in range(operators):
        stream = length.renamed(f"length_{number}")(stream)
    FakeTrainer(model=Model("other"))(stream)
    built = time.perf_counter()
    graph.check()
    checked = time.perf_counter()
    plan(graph, Devices(cpus=2))
    return {
        "build_s": built - began,
        "check_s": checked - built,
        "plan_s": time.perf_counter() - checked,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", type=int, default=1000)
    figures = measure(parser.parse_args().operators)
    print(
        {name: round(value, 3) for name, value in figures.items()},
        "total",
        round(sum(figures.values()), 3),
    )
