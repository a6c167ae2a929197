"""`--foresee`: devices and a workload as text, what is foreseen of a graph as text."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataflow.errors import GraphError
from dataflow.foresight.calibration import read_constants
from dataflow.foresight.choose import best_ways
from dataflow.foresight.foresee import foresee
from dataflow.foresight.report import lines, picture, to_plain, ways
from dataflow.foresight.spec import read_devices
from dataflow.foresight.steps import CONSTANTS
from dataflow.foresight.workload import read_workload
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import Plan
from dataflow.planning.sharing import Wishes
from dataflow.structure import Structure
from dataflow.system.files import write_atomically


def foreseen_of_run(
    graph: Structure, made: Plan, workload: str, constants: str, *, steps: int | None
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
    replicas: Mapping[str, int] | None = None, ranks: Mapping[str, int] | None = None, constants: str = CONSTANTS[0],
    draw: Path | None = None,
) -> str:  # fmt: skip
    """What a graph takes on devices that are named as `read_devices` has them.

    gpus: accelerators by node; empty: dealt out for the shortest step. workload: as `read_workload` has it. constants:
    as `read_constants` has them. draw: where a time line goes (.svg), or all figures (.json). GraphError for
    what cannot be read or foreseen."""
    if draw is not None and draw.suffix not in (".svg", ".json"):
        raise GraphError(f"what is foreseen is drawn as .svg, or written as .json; found '{draw}'; name one of these")
    room, texts = read_devices(devices), read_workload(workload)
    known = read_constants(constants)
    if isinstance(gpus, str):
        raise GraphError(
            "operators that share their devices are not foreseen yet; give each its own, or leave gpus out"
        )
    said = ""
    if gpus or not room.gpus:
        found = foresee(
            graph, room, gpus=gpus, replicas=replicas, ranks=ranks, workload=texts, steps=steps, constants=known
        )
    else:
        best = best_ways(graph, room, workload=texts, steps=steps, constants=known)
        found, said = best[0].foreseen, f"\n{ways(best)}"
    if draw is not None:
        text = json.dumps(to_plain(found), indent=1) if draw.suffix == ".json" else picture(found, graph.name)
        write_atomically(draw, lambda file: file.write(text.encode()))
        said += f"\nwrote {draw}"
    return f"{lines(found)}{said}"
