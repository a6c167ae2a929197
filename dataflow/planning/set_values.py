"""Other values for knobs of a declared graph: which may change, and what becomes of its operators;
pure.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dataflow.errors import GraphError, nearest
from dataflow.folder.live_changes import MAX_STALENESS
from dataflow.node import Generate, Operator
from dataflow.settable import STEP, Settable
from dataflow.structure import Structure, generators_of


def settable_of(graph: Structure, name: str) -> dict[str, Settable]:
    """Knobs of an operator that may change while a run goes on, the bound of the feedback to it
    among them.
    """
    operator = graph.operators[name]
    knobs = dict(operator.settable())
    for feedback in graph.feedbacks:
        if feedback.reader is operator and isinstance(operator, Generate):
            knobs[MAX_STALENESS] = Settable(value=feedback.max_staleness, at=STEP, kind=int)
    return knobs


def with_values(
    graph: Structure, wishes: Mapping[str, Any]
) -> tuple[dict[str, Operator], dict[str, Any]]:
    """Operators that take the place of others, by name, and other max_staleness, by reader.

    wishes: values by NODE.KNOB. Errors: GraphError.
    """
    operators: dict[str, Operator] = {}
    bounds: dict[str, Any] = {}
    for place, value in wishes.items():
        name, knob = placed(graph, place)
        if knob == MAX_STALENESS:
            bounds[name] = value
            continue
        old = operators.get(name, graph.operators[name])
        new = operators[name] = old.with_knob(knob, value)
        if new.traits.sampling.temperature not in (None, old.traits.sampling.temperature):
            for other_operator in graph.operators.values():
                if graph.operators[name] in generators_of(graph, other_operator.name):
                    operators[other_operator.name] = operators.get(
                        other_operator.name, other_operator
                    ).at_temperature(new.traits.sampling.temperature)
    return operators, bounds


def placed(
    graph: Structure,
    place: str,
    knobs_of: Callable[[Structure, str], Mapping[str, Settable]] = settable_of,
) -> tuple[str, str]:
    """The node and the knob of NODE.KNOB. knobs_of: those of a node that may change. GraphError
    where there is none.
    """
    name, _, knob = place.partition(".")
    if name not in graph.operators:
        raise GraphError(
            f"'{place}' names no node of the graph, which has"
            f" {list(graph.operators)}{nearest(name, graph.operators)}; write NODE.KNOB, as in"
            " trainer.lr"
        )
    knobs = knobs_of(graph, name)
    if knob in knobs:
        return name, knob
    may = (
        ", ".join(f"{name}.{knob_name} = {knobs[knob_name].value!r}" for knob_name in knobs)
        or f"nothing of '{name}'"
    )
    raise GraphError(
        f"'{place}' is no knob that may change while a run goes on{nearest(knob, knobs)}; these"
        f" may: {may}"
    )
