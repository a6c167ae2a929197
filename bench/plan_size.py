"""How long a plan over 512 hosts of 8 accelerators takes, and its digest: python -m bench.plan_size."""

import argparse
import time

from dataflow import Graph, Model, Plan, scorer
from dataflow.planning.hosts import Devices, Host
from dataflow.planning.plan import plan
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer


@scorer
def length(completion: str) -> int:
    """Characters."""
    return len(completion)


def build() -> Graph:
    """Asynchronous, with a generator, a scorer and a trainer."""
    graph, model = Graph("large"), Model("policy")
    generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model)
    trainer(length(generator(graph.source(FakePrompts(size=None)))))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    return graph


def measure(hosts: int, gpus: int) -> dict[str, float]:
    """Seconds for plans that use every accelerator, or as many processes on the CPU; of their digest and their text."""
    devices = Devices.of([Host(name=f"host-{number}", cpus=2 * gpus, gpus=gpus) for number in range(hosts)])
    graph, figures = build(), {}
    all_but_one = (hosts - 1) * gpus
    ways = {
        "gpu": {"gpus": {"generator": all_but_one, "trainer": gpus}},
        "cpu": {"replicas": {"generator": all_but_one}},
    }
    for way, how in ways.items():
        began = time.perf_counter()
        made: Plan = plan(graph, devices, **how)  # type: ignore[arg-type]
        planned = time.perf_counter()
        made.digest()
        digested = time.perf_counter()
        made.explain()
        figures |= {
            f"{way}_plan_s": planned - began, f"{way}_digest_s": digested - planned,
            f"{way}_explain_s": time.perf_counter() - digested,
        }  # fmt: skip
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=512)
    parser.add_argument("--gpus", type=int, default=8)
    options = parser.parse_args()
    print({name: round(value, 3) for name, value in measure(options.hosts, options.gpus).items()})
