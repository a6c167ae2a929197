"""Pictures of a run from what its folder says: the graph without its program, and the curves that
matter first.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.draw import svg
from dataflow.draw.charts import Chart, Line
from dataflow.draw.picture import KNOBS_SHOWN, DrawnEdge, Loop, OperatorBox, Picture, shorten
from dataflow.history.describe import model_of
from dataflow.runs.tables import series
from dataflow.runs.texts import visible
from dataflow.runs.which import trainers_of

_MODEL = re.compile(r"Model\(.*?\bname='([^']+)'")
_LONGEST = 300
"""Characters of a name."""


@dataclass(frozen=True)
class Figure:
    """A figure of metrics.jsonl that is drawn."""

    name: str
    title: str
    from_zero: bool = False


FIGURES = (
    Figure("reward_mean", "reward, mean of a step"),
    Figure("eval_accuracy", "accuracy on held-out prompts", True),
    Figure("loss", "loss"),
    Figure("kl", "KL(generator, trainer), nats per token"),
    Figure("entropy", "entropy, nats per token"),
    Figure("grad_norm", "norm of the gradient", True),
    Figure("completion_tokens_mean", "tokens of a completion, mean", True),
    Figure("staleness_mean", "staleness, versions, mean", True),
    Figure("truncated_share", "share of tokens out of the loss's bounds", True),
    Figure("ess", "effective share of tokens (ess)", True),
    Figure("trained_tokens_per_s", "tokens trained per second", True),
    Figure("generated_tokens_per_s", "tokens generated per second", True),
    Figure("efficiency", "time at work of what bounds the run", True),
    Figure("seconds_step", "seconds of a step", True),
    Figure("signal_share", "groups whose rewards differ", True),
    Figure("staleness_max", "staleness, versions, most", True),
    Figure("staleness_generating_mean", "versions made while a rollout was generated, mean", True),
    Figure("staleness_waiting_mean", "versions made while it waited for its step, mean", True),
    Figure(
        "weights_trainer_seconds", "seconds of an exchange of weights, as the trainer sees it", True
    ),
    Figure("weights_reader_seconds", "the same, as the reader sees it", True),
    Figure("weights_moved_bytes", "bytes of an exchange of weights", True),
)
"""Those that matter first, in their order."""
DOZEN = 12
"""So many of those that a run has are shown without a question."""


def charts_of(
    lines: Mapping[str, Sequence[Mapping[str, Any]]], marks: Sequence[tuple[float, str]] = ()
) -> list[Chart]:
    """A chart for each of the dozen figures that matter first, of those that some run has.

    lines: of metrics.jsonl, by run.
    """
    found = []
    for figure in FIGURES:
        drawn = [
            Line(name, series(its, figure.name), stream)
            for stream, (name, its) in enumerate(lines.items())
        ]
        if any(line.points for line in drawn):
            dots = figure.name == "eval_accuracy"
            found.append(Chart(figure.title, drawn, figure.from_zero, dots=dots, marks=marks))
    return found[:DOZEN]


def graph_svg(graph: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The graph that graph.json describes, as a run draws its own."""
    return svg.render(picture_of(graph, config))


def picture_of(graph: Mapping[str, Any], config: Mapping[str, Any]) -> Picture:
    """The same as plain values; what is no node or no edge is passed over."""
    train = set(map(_name, trainers_of(graph, config)))
    nodes = {_name(node["name"]): node for node in graph.get("nodes", ()) if "name" in node}
    edges = [
        {
            **edge,
            "from": _name(edge.get("from")),
            "to": _name(edge.get("to")),
            "columns": {
                _name(column): _name(kind) for column, kind in (edge.get("columns") or {}).items()
            },
        }
        for edge in graph.get("edges", ())
    ]
    edges = [edge for edge in edges if edge["from"] in nodes and edge["to"] in nodes]
    data = [edge for edge in edges if edge.get("plane") == "data"]
    wires = tuple(
        DrawnEdge(
            tail=edge["from"],
            head=edge["to"],
            stream=_stream(edge),
            columns=edge["columns"],
            added=_added(edge, data),
        )
        for edge in data
    )
    loops = tuple(
        Loop(
            tail=edge["from"],
            head=edge["to"],
            model=_model(nodes[edge["to"]]),
            max_staleness=edge.get("max_staleness"),
            refresh=_refresh(edge),
        )
        for edge in edges
        if edge.get("plane") == "weights"
    )
    return Picture(
        boxes=tuple(_box(name, node, name in train) for name, node in nodes.items()),
        wires=wires,
        loops=loops,
        streams=tuple(dict.fromkeys(wire.stream for wire in wires)),
        frames=(),
        title=_name(graph.get("name", "")),
    )


def _box(name: str, node: Mapping[str, Any], trains: bool) -> OperatorBox:
    kind = _name(node.get("operator", ""))
    knobs = [
        f"{_name(knob)}={shorten(knob_text(value))}"
        for knob, value in (node.get("knobs") or {}).items()
    ]
    more = len(knobs) - KNOBS_SHOWN
    if more > 0:
        knobs = [*knobs[:KNOBS_SHOWN], f"…+{more}"]
    role = str(node.get("kind", "operator"))
    if trains:
        role = "trainer"
    elif role == "operator" and "model" in (node.get("knobs") or {}):
        role = "model"
    same = kind.lower().replace("_", "") == name.lower().replace("_", "")
    role = role if role in ("source", "operator", "model", "trainer", "sink") else "operator"
    return OperatorBox(
        name=name, subtitle="" if same else kind, knobs=tuple(knobs), role=role, about=kind
    )


def knob_text(value: object) -> str:
    """A knob as short as it can be: of a model its name."""
    found = _MODEL.match(str(value))
    return _name(
        f"{found[1]}{', frozen' if 'is_frozen=True' in str(value) else ''}" if found else value
    )


def _stream(edge: Mapping[str, Any]) -> str:
    return _name(edge.get("source") or edge.get("lane") or "")


def _name(text: object) -> str:
    """A name of somebody's graph, with no sign in it that acts."""
    return visible(text, _LONGEST)


def _added(edge: Mapping[str, Any], data: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Columns of an edge that no edge into its tail has."""
    before = {
        column
        for other in data
        if other["to"] == edge["from"] and _stream(other) == _stream(edge)
        for column in other.get("columns") or ()
    }
    return tuple(name for name in edge.get("columns") or () if name not in before)


def _model(node: Mapping[str, Any]) -> str:
    return _name(model_of(node).get("name") or "weights")


def _refresh(edge: Mapping[str, Any]) -> str:
    found = edge.get("refresh")
    return (
        ", ".join(f"{name} {value}" for name, value in found.items() if value)
        if isinstance(found, dict)
        else ""
    )
