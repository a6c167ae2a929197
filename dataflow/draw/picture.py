"""What a picture shows of a graph, as plain values: boxes, wires, streams and frames."""

import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow import records
from dataflow.model import Model
from dataflow.node import Operator

KNOBS_SHOWN = 4
COLUMNS_SHOWN = 3
VALUE_LENGTH = 26

# Columns that keep the books: only counted, so that a label shows what the reader cares for.
_BOOKKEEPING = frozenset(
    (
        records.GROUP_ID,
        records.PROMPT_ID,
        records.GROUP_SIZE,
        records.MIN_VERSION,
        records.ROUND_SIZE,
        records.ROLLOUT_ID,
        records.POSITION,
        records.FINISH_REASON,
        records.ERROR,
        records.MASK,
    )
)


@dataclass(frozen=True)
class DeviceFrame:
    """A group of devices and the nodes that a plan puts there."""

    label: str
    """Such as `gpu 0-5` or `cpu x1`."""
    nodes: tuple[str, ...]
    """Names of the nodes inside; names that the graph lacks are ignored."""
    where: str = ""
    """On which hosts, such as `hosts a, b and 3 more`; empty: on the only one."""


@dataclass(frozen=True, kw_only=True)
class OperatorBox:
    """One operator."""

    name: str
    subtitle: str
    """Class of the operator; empty where the name already says it."""
    knobs: tuple[str, ...]
    """Lines such as `group_size=8`, the last one `…+3` where there are more."""
    role: str
    """source | operator | model | trainer | sink: what the colour tells."""
    about: str
    """What the operator is, in sentences."""
    operator: Operator
    """The declaration itself, for pages that show all of it."""


@dataclass(frozen=True, kw_only=True)
class DrawnEdge:
    """Rows of one stream from one operator to another."""

    tail: str
    head: str
    stream: str
    columns: Mapping[str, Any]
    """Name to Arrow type of what travels here."""
    added: tuple[str, ...]
    """The columns that the tail added."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Weights on their way from the operator that trains them to one that reads them; or, with
    "turns" as its model, an episode and the generator that it asks.
    """

    tail: str
    head: str
    model: str
    max_staleness: int | None
    refresh: str = ""
    """Which versions, where not the newest of them goes."""
    executor: str = ""
    """How they travel, where a plan tells."""

    @property
    def label(self) -> str:
        """Text on the edge."""
        bound = "" if self.max_staleness is None else f"max_staleness={self.max_staleness}"
        return " · ".join(filter(None, (self.model, bound, self.refresh, self.executor)))


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Everything that a picture shows, in a fixed order."""

    boxes: tuple[OperatorBox, ...]
    wires: tuple[DrawnEdge, ...]
    loops: tuple[Loop, ...]
    streams: tuple[str, ...]
    """Names of the streams, in the order in which they are first met."""
    frames: tuple[DeviceFrame, ...]
    title: str

    @property
    def shades(self) -> list[int]:
        """By frame, the number of its colour: one for each, or, in a run over hosts, for each
        place.
        """
        places = list(dict.fromkeys(frame.where for frame in self.frames))
        return [
            places.index(frame.where) if frame.where else at for at, frame in enumerate(self.frames)
        ]


def read(
    graph: Any, frames: Sequence[DeviceFrame] | None = None, title: str | None = None
) -> Picture:
    """The picture of a NetworkX MultiDiGraph (`Graph.nx`)."""
    boxes = tuple(_box(name, data["operator"]) for name, data in graph.nodes(data=True))
    wires: list[DrawnEdge] = []
    loops: list[Loop] = []
    for tail, head, key, data in graph.edges(keys=True, data=True):
        if data.get("plane") in ("weights", "turns"):
            name = getattr(data.get("model"), "name", data["plane"])
            loops.append(
                Loop(
                    tail=tail,
                    head=head,
                    model=name,
                    max_staleness=data.get("max_staleness"),
                    refresh=str(data.get("refresh") or ""),
                    executor=data.get("executor", ""),
                )
            )
        else:
            columns, stream = data.get("columns") or {}, str(data.get("source", key))
            added = tuple(data.get("added") or ())
            wires.append(
                DrawnEdge(tail=tail, head=head, stream=stream, columns=dict(columns), added=added)
            )
    sources = [box.name for box in boxes if box.role == "source"]
    wire_streams = dict.fromkeys(wire.stream for wire in wires)
    streams = [name for name in sources if name in wire_streams]
    streams += [stream for stream in wire_streams if stream not in streams]
    names = {box.name for box in boxes}
    known_frames = [
        DeviceFrame(f.label, tuple(n for n in dict.fromkeys(f.nodes) if n in names), f.where)
        for f in frames or ()
    ]
    return Picture(
        boxes=boxes,
        wires=tuple(wires),
        loops=tuple(loops),
        streams=tuple(streams),
        frames=tuple(frame for frame in known_frames if frame.nodes),
        title=title or "",
    )


def column_lines(added: Sequence[str]) -> list[str]:
    """Names of new columns as a label of few lines, those that keep the books and the rest counted:
    `…+5`.
    """
    telling = [name for name in added if name not in _BOOKKEEPING] or list(added)
    shown = [shorten(name) for name in telling[:COLUMNS_SHOWN]]
    return shown if len(shown) == len(added) else [*shown, f"…+{len(added) - len(shown)}"]


def knob_text(value: Any) -> str:
    """A knob's value as short code: functions and models by name, strings in quotes, floats
    short.
    """
    if isinstance(value, Model):
        adapted = value.name if value.lora is None else f"{value.name} + LoRA({value.lora.rank})"
        return f"{adapted}, frozen" if value.is_frozen else adapted
    if isinstance(value, functools.partial):
        inner = [knob_text(item) for item in value.args]
        inner += [f"{name}={knob_text(item)}" for name, item in value.keywords.items()]
        return f"{knob_text(value.func)}({', '.join(inner)})"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Operator):
        return value.name
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return value.__name__
    if isinstance(value, tuple | list) and len(value) <= 8:
        listed = ", ".join(knob_text(item) for item in value)
        comma = "," if len(value) == 1 else ""
        return f"({listed}{comma})" if isinstance(value, tuple) else f"[{listed}]"
    plain = getattr(type(value), "__repr__", None) is object.__repr__
    return type(value).__name__ if plain else repr(value)


def shorten(text: str, length: int = VALUE_LENGTH) -> str:
    """At most `length` characters on one line, the middle left out, so that both ends stay
    readable.
    """
    text = " ".join(text.split())
    if len(text) <= length:
        return text
    right = (length - 1) // 2
    return f"{text[: length - 1 - right]}…{text[len(text) - right :]}"


def _box(name: str, operator: Operator) -> OperatorBox:
    kind = type(operator).__name__
    knobs = [f"{knob}={shorten(knob_text(value))}" for knob, value in operator.knobs().items()]
    more = len(knobs) - KNOBS_SHOWN
    if more > 0:
        knobs = [*knobs[:KNOBS_SHOWN], f"…+{more}"]
    same = kind.lower().replace("_", "") == name.lower().replace("_", "")
    return OperatorBox(
        name=name,
        subtitle="" if same else kind,
        knobs=tuple(knobs),
        role=_role(operator),
        about=type(operator).__doc__ or "",
        operator=operator,
    )


def _role(operator: Operator) -> str:
    if operator.trains:
        return "trainer"
    if operator.kind in ("source", "sink"):
        return operator.kind
    return "model" if operator.uses is not None else "operator"
