"""The graph as one page without network: the picture to pan and zoom, and a panel that shows an
operator.
"""

import json
from importlib import resources
from string import Template
from typing import Any, TypeAlias

from dataflow.draw import svg
from dataflow.draw.labels import xml
from dataflow.draw.picture import OperatorBox, Picture, knob_text
from dataflow.model import Model

Columns: TypeAlias = dict[str, str]


def render(picture: Picture) -> str:
    """The HTML page of a picture."""
    facts = [_facts(picture, box) for box in picture.boxes]
    # In a script element only "<" could end it early; as an escape it is the same JSON.
    data = json.dumps(facts, ensure_ascii=True).replace("<", "\\u003c")
    return Template(_part("page.html")).substitute(
        title=xml(picture.title or "dataflow graph"),
        style=_part("page.css"),
        svg=svg.render(picture),
        data=data,
        script=_part("page.js"),
    )


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _facts(picture: Picture, box: OperatorBox) -> dict[str, Any]:
    kind = type(box.operator)
    arriving: dict[str, Columns] = {}
    leaving: dict[str, Columns] = {}
    added: dict[str, None] = {}
    for wire in picture.wires:
        columns = {name: str(arrow) for name, arrow in wire.columns.items()}
        if wire.head == box.name:
            arriving.setdefault(wire.stream, {}).update(columns)
        if wire.tail == box.name:
            leaving.setdefault(wire.stream, {}).update(columns)
            added.update(dict.fromkeys(wire.added))
    uses = box.operator.uses
    return {
        "name": box.name,
        "kind": f"{kind.__module__}.{kind.__qualname__}",
        "role": box.role,
        "doc": box.operator.about,
        "model": _model(uses) if uses is not None else "",
        "devices": [
            " · ".join(filter(None, (frame.label, frame.where)))
            for frame in picture.frames
            if box.name in frame.nodes
        ],
        "knobs": {name: knob_text(value) for name, value in box.operator.knobs().items()},
        "arriving": _by_columns("columns in", arriving),
        "leaving": _by_columns("columns out", leaving),
        "added": list(added),
        "weights": [
            f"{b.tail} → {b.head}: {b.label}" for b in picture.loops if box.name in (b.tail, b.head)
        ],
    }


def _model(model: Model) -> str:
    """Name and facts of a model."""
    facts = [
        model.source,
        model.head,
        model.dtype,
        *([str(model.lora)] if model.lora is not None else []),
    ]
    return f"{model.name} ({', '.join(facts)})"


def _by_columns(title: str, streams: dict[str, Columns]) -> list[tuple[str, Columns]]:
    """One table for all streams that carry the same columns."""
    tables: list[tuple[list[str], Columns]] = []
    for stream, columns in streams.items():
        same = next((names for names, shared in tables if shared == columns), None)
        if same is None:
            tables.append(([stream], columns))
        else:
            same.append(stream)
    return [(f"{title}, rows of {', '.join(names)}", columns) for names, columns in tables]
