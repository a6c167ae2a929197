"""Which way of dealing devices out takes the shortest step: many by closed forms, the best of them by simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataflow.errors import GraphError
from dataflow.foresight.foresee import Foreseen, foresee, only
from dataflow.foresight.rates import ASSUMED_CONSTANTS, Constants
from dataflow.foresight.workload import Workload
from dataflow.node import Generate, Learn
from dataflow.planning.hosts import Devices
from dataflow.structure import Structure

BEST = 10
"""Ways that are simulated."""
_SPLITS = 64


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of dealing devices out."""

    gpus: Mapping[str, int]
    """By node."""
    foreseen: Foreseen

    @property
    def flag(self) -> str:
        """As `--gpus` has it."""
        return ",".join(f"{node}={count}" for node, count in self.gpus.items())


def splits(graph: Structure, devices: Devices) -> list[Mapping[str, int]]:
    """Some 64 ways to deal all devices out to trainer and generator, in whole replicas; other operators with models get
    one replica each."""
    trainer, generator = only(graph, Learn), only(graph, Generate)
    others = {
        name: each.traits.tensor_parallel * each.traits.dp_replicate
        for name, each in graph.operators.items()
        if each.uses is not None and each not in (trainer, generator) and not each.light
    }
    free = devices.gpus - sum(others.values())
    unit = generator.traits.tensor_parallel
    step = max(unit, -(-free // _SPLITS // unit) * unit)
    return [
        {generator.name: makes, trainer.name: free - makes, **others}
        for makes in range(unit, free, step)
        if (free - makes) % (trainer.traits.tensor_parallel * trainer.traits.dp_replicate) == 0
    ]


def best_ways(
    graph: Structure, devices: Devices, *, workload: Workload | None = None, steps: int | None = None,
    constants: Constants = ASSUMED_CONSTANTS,
) -> Sequence[Way]:  # fmt: skip
    """The best ten ways to deal all devices out, the one with the shortest step first.

    GraphError where no way fits: why the last did not."""
    found: list[tuple[float, int, Mapping[str, int]]] = []
    why: GraphError | None = None
    for number, gpus in enumerate(splits(graph, devices)):
        try:
            made = foresee(
                graph, devices, gpus=gpus, workload=workload, steps=steps, constants=constants, simulated=False
            )
        except GraphError as error:
            why = error
            continue
        found.append((made.step_s, number, gpus))
    if not found:
        raise why or GraphError(f"{devices.gpus} devices are too few for a trainer and a generator; name more")
    best = [
        Way(gpus=gpus, foreseen=foresee(
            graph, devices, gpus=gpus, workload=workload, steps=steps, constants=constants
        ))
        for _, _, gpus in sorted(found, key=lambda each: each[:2])[:BEST]
    ]  # fmt: skip
    return sorted(best, key=lambda way: way.foreseen.step_s)
