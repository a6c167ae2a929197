"""`--foresee`: devices and a workload as text, what is foreseen of a graph as text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataflow.errors import GraphError
from dataflow.foresight.calibration import read_constants
from dataflow.foresight.choose import best_ways
from dataflow.foresight.foresee import foresee
from dataflow.foresight.rates import ASSUMED_CONSTANTS
from dataflow.foresight.report import lines, to_plain, ways
from dataflow.foresight.spec import read_devices
from dataflow.foresight.workload import read_workload
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import Plan
from dataflow.planning.sharing import Wishes
from dataflow.structure import Structure


def foreseen_of_run(
    graph: Structure, made: Plan, workload: str, constants: Path, *, steps: int | None
) -> dict[str, Any]:  # fmt: skip
    """What a run that is about to begin will take, for its folder.

    GraphError as `foresee`, and for accelerators, whose kind nobody has named."""
    if made.devices.gpus:
        raise GraphError("a run on accelerators is not foreseen yet as it begins; ask with --foresee 16xH100, say")
    replicas = {name: each.replicas for name, each in made.placements.items() if each.replicas > 1}
    ranks = {name: each.ranks for name, each in made.placements.items() if each.ranks > 1}
    return to_plain(foresee(
        graph, Devices(cpus=made.devices.cpus), replicas=replicas, ranks=ranks, workload=read_workload(workload),
        steps=steps, constants=read_constants(constants),
    ))  # fmt: skip


def told(
    graph: Structure, devices: str, *, gpus: Wishes | str | None, workload: str, steps: int | None,
    replicas: Mapping[str, int] | None = None, ranks: Mapping[str, int] | None = None, constants: Path | None = None,
) -> str:  # fmt: skip
    """What a graph takes on devices that are named as `read_devices` has them.

    gpus: accelerators by node; empty: dealt out for the shortest step. workload: as `read_workload` has it. constants:
    a file that `dataflow calibrate` wrote. GraphError for what cannot be read or foreseen."""
    room, found = read_devices(devices), read_workload(workload)
    known = ASSUMED_CONSTANTS if constants is None else read_constants(constants)
    if isinstance(gpus, str):
        raise GraphError(
            "operators that share their devices are not foreseen yet; give each its own, or leave gpus out"
        )
    if gpus or not room.gpus:
        return lines(foresee(
            graph, room, gpus=gpus, replicas=replicas, ranks=ranks, workload=found, steps=steps, constants=known
        ))  # fmt: skip
    best = best_ways(graph, room, workload=found, steps=steps, constants=known)
    return f"{lines(best[0].foreseen)}\n{ways(best)}"
