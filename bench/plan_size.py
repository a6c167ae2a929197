"""A plan over 512 hosts of 8 accelerators, its digest, a new host for a worker: python -m
bench.plan_size.

Seconds of the processor, so that what else runs on the machine does not count.
"""

import argparse
import time

from dataflow import Graph, Model, Plan, scorer
from dataflow.planning.hosts import Devices, Host
from dataflow.planning.model_size import ModelSize
from dataflow.planning.plan import plan
from dataflow.planning.seats import Fixed, Seat
from dataflow.scheduler.table import Table
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer


@scorer
def length(completion: str) -> int:
    """Characters."""
    return len(completion)


SIZES = {"policy": ModelSize(parameters=8_000_000_000)}


def build() -> Graph:
    """Asynchronous, with a generator, a scorer and a trainer."""
    graph, model = Graph("large"), Model("policy")
    generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model)
    trainer(length(generator(graph.source(FakePrompts(size=None)))))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    return graph


def measure(hosts: int, gpus: int) -> dict[str, float]:
    """Plans of as many accelerators, or processes on the CPU, less one host's; digest, text, one
    worker's new place.
    """
    devices = Devices.of(
        [Host(name=f"host-{number}", cpus=2 * gpus, gpus=gpus) for number in range(hosts)]
    )
    graph = build()
    figures: dict[str, float] = {}
    generators = (hosts - 2) * gpus
    ways = {
        "gpu": {"gpus": {"generator": generators, "trainer": gpus}},
        "cpu": {"replicas": {"generator": generators}},
    }
    for way, how in ways.items():
        began = time.process_time()
        placed: Plan = plan(graph, devices, sizes=SIZES, **how)  # type: ignore[arg-type]
        planned = time.process_time()
        placed.digest()
        digested = time.process_time()
        placed.explain()
        explained = time.process_time()
        records = list(Table(graph=graph, plan=placed))
        lost = next(record for record in records if record.worker == "generator")
        alive = {host.name for host in devices.hosts} - {lost.host}
        stay = {
            (record.worker, record.replica): Seat(record.host, record.gpus)
            for record in records
            if record.host != lost.host
        }
        tabled, wanted = time.process_time(), (lost.worker, lost.replica)
        seats, _ = placed.settle(devices, [wanted], Fixed(seats=stay, hosts=alive))
        assert wanted in seats
        moved = time.process_time()
        figures |= {
            f"{way}_plan_s": planned - began,
            f"{way}_digest_s": digested - planned,
            f"{way}_explain_s": explained - digested,
            f"{way}_rehost_s": moved - tabled,
        }
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=512)
    parser.add_argument("--gpus", type=int, default=8)
    options = parser.parse_args()
    print({name: round(value, 3) for name, value in measure(options.hosts, options.gpus).items()})
