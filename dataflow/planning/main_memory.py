"""What processes with accelerators need of their hosts' main memory."""

from collections.abc import Mapping, Sequence

from dataflow.planning.gpu_groups import Group
from dataflow.planning.memory_need import arriving_bytes, asleep_bytes, by_way, inputs_bytes
from dataflow.planning.model_size import ModelSize
from dataflow.planning.placement import Need, Placement, Spot
from dataflow.structure import Structure

ProcessNeed = tuple[str, Spot, Need]
"""A process, where, and what it needs there."""


def main_memory_needs(
    graph: Structure,
    placements: Mapping[str, Placement],
    turns: Sequence[Group],
    sizes: Mapping[str, ModelSize],
) -> list[ProcessNeed]:
    """Of all processes, as `check_fit` takes them."""
    return [
        *_asleep(graph, placements, turns, sizes),
        *_arriving(graph, placements, sizes),
        *_inputs(graph, placements, sizes),
    ]


def _asleep(
    graph: Structure,
    placements: Mapping[str, Placement],
    turns: Sequence[Group],
    sizes: Mapping[str, ModelSize],
) -> list[ProcessNeed]:
    """The main memory that nodes which take turns on accelerators use while asleep, by host."""
    asleep = []
    for name in (name for group in turns for name in group if placements[name].gpus):
        operator, placement = graph.operators[name], placements[name]
        size = sizes.get(operator.uses.source) if operator.uses else None
        if nbytes := asleep_bytes(graph, operator, size, placement.ranks):
            asleep.append(
                (name, (placement.host(0), "cpu"), Need({"while others have their turn": nbytes}))
            )
    return asleep


def _arriving(
    graph: Structure, placements: Mapping[str, Placement], sizes: Mapping[str, ModelSize]
) -> list[ProcessNeed]:
    """The main memory in which replicas receive versions, by host."""
    arriving = []
    for feedback in graph.feedbacks:
        placement = placements[feedback.reader.name]
        operator = by_way(feedback.reader, placement.chosen)
        size = sizes.get(operator.uses.source) if operator.uses else None
        if placement.gpus and (nbytes := arriving_bytes(operator, size)):
            arriving += [
                (
                    f"{placement.worker}-{replica}",
                    (placement.host(replica), "cpu"),
                    Need({"a version that arrives": nbytes}),
                )
                for replica in range(placement.replicas)
            ]
    return arriving


def _inputs(
    graph: Structure, placements: Mapping[str, Placement], sizes: Mapping[str, ModelSize]
) -> list[ProcessNeed]:
    """The main memory in which trainers' ranks keep what goes into layers, by host."""
    away = []
    for name, placement in placements.items():
        operator = by_way(graph.operators[name], placement.chosen)
        size = sizes.get(operator.uses.source) if operator.uses else None
        if placement.gpus and (nbytes := inputs_bytes(graph, operator, size)):
            away += [
                (
                    f"{placement.worker}-0.{rank}",
                    (placement.host(0, rank), "cpu"),
                    Need({"inputs of layers": nbytes}),
                )
                for rank in range(placement.ranks)
            ]
    return away
