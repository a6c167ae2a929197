"""The picture of a graph as one SVG without anything outside it, readable on light and dark
pages.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from itertools import combinations, pairwise
from string import Template
from typing import Any, TypeAlias

from dataflow.draw import theme
from dataflow.draw.geometry import (
    BackEdge,
    BackRoute,
    DrawnLayout,
    ForwardEdge,
    Point,
    Rect,
    Size,
    Spacing,
)
from dataflow.draw.layout import arrange
from dataflow.draw.picture import (
    DeviceFrame,
    DrawnEdge,
    OperatorBox,
    Picture,
    column_lines,
    knob_text,
    shorten,
)
from dataflow.draw.theme import mono_width, sans_width, xml
from dataflow.model import Model

NAME, SMALL, CODE = 13.0, 10.0, 9.5
LINE = 12.5
PAD = 12.0
NAME_LENGTH = 32
FRAME_LENGTH = 40
ARROW = 6.0
MOST_MERGED = 150
"""Frames of more boxes than this are drawn box by box."""
FRAME_PAD, FRAME_TITLE, FRAME_PLACE = 11.0, 15.0, 12.0


def render(picture: Picture) -> str:
    """The SVG of a picture."""
    wires = _by_tail(picture)
    labels = {name: _labels(outgoing) for name, outgoing in wires.items()}
    spacing = Spacing()
    if picture.frames:
        title = _title(picture)
        extra = 2 * FRAME_PAD + title
        spacing = Spacing(
            gap=spacing.gap + FRAME_PAD, row=spacing.row + extra - 14, outer=spacing.outer + title
        )
    indent = 8.0 + FRAME_PAD * bool(picture.frames)
    sizes = {
        box.name: _size(
            box, wires.get(box.name, []), labels.get(box.name, ([], [])), spacing.stream, indent
        )
        for box in picture.boxes
    }
    links = [
        ForwardEdge(tail=w.tail, head=w.head, stream=picture.streams.index(w.stream))
        for w in picture.wires
    ]
    backs = [
        BackEdge(tail=b.tail, head=b.head, label_width=mono_width(b.label, CODE) + 12)
        for b in picture.loops
    ]
    layout = arrange(sizes, links, backs, spacing)
    wider = _widened(picture, layout, sizes)
    if wider:
        sizes.update(wider)
        layout = arrange(sizes, links, backs, spacing)
    columns = [
        _columns(layout.boxes[name], sizes[name], lines, indent) for name, lines in labels.items()
    ]
    return _document(picture, layout, columns, spacing)


def _document(
    picture: Picture, layout: DrawnLayout, columns: Sequence[str], spacing: Spacing
) -> str:
    body: list[str] = []
    framed = [_pieces(frame.nodes, layout, _title(picture)) for frame in picture.frames]
    for shade, frame, rects in zip(picture.shades, picture.frames, framed, strict=True):
        body += [_frame(shade, frame, rect) for rect in rects]
    many = len(picture.streams) > 1
    led: set[tuple[str, str]] = set()
    for wire, points in reversed(list(zip(picture.wires, layout.links, strict=True))):
        colour = (
            f"stream{picture.streams.index(wire.stream) % len(theme.LIGHT_STREAMS)}"
            if many
            else "stream"
        )
        body.append(_link(wire, points[1:] if (wire.tail, wire.stream) in led else points, colour))
        led.add((wire.tail, wire.stream))
    for loop, route in zip(picture.loops, layout.backs, strict=True):
        body.append(_back(f"{loop.tail} → {loop.head}: {loop.label}", route))
    for shade, frame, rects in zip(picture.shades, picture.frames, framed, strict=True):
        body += [_frame_label(shade, frame, rect) for rect in rects]
    for number, box in enumerate(picture.boxes):
        body.append(_box(number, box, layout.boxes[box.name]))
    body += columns
    for loop, route in zip(picture.loops, layout.backs, strict=True):
        body.append(_back_label(loop.label, route.label))
    bounds = layout.bounds
    for rect in (piece for rects in framed for piece in rects):
        bounds = bounds.union(rect)
    legend, legend_width = _legend(picture, bounds.left, bounds.bottom + 26)
    top = 34.0 if picture.title else 0.0
    view = Rect(
        left=bounds.left,
        top=bounds.top - top,
        right=max(
            bounds.right, bounds.left + legend_width, bounds.left + sans_width(picture.title, 16)
        ),
        bottom=bounds.bottom + (34.0 if legend else 0.0),
    ).grown(spacing.margin, spacing.margin, spacing.margin)
    heading = (
        f'<text class="heading" x="{_n(bounds.left)}"'
        f' y="{_n(bounds.top - 20)}">{xml(picture.title)}</text>'
    )
    spoken = xml(picture.title or "dataflow graph")
    words = xml(
        f"{len(picture.boxes)} operators: " + ", ".join(box.name for box in picture.boxes[:60])
    )
    return "\n".join(
        [
            (
                '<svg xmlns="http://www.w3.org/2000/svg" class="dataflow-graph" role="img" '
                f'viewBox="{_n(view.left)} {_n(view.top)} {_n(view.width)} {_n(view.height)}" '
                f'width="{_n(view.width)}" height="{_n(view.height)}">'
            ),
            f"<title>{spoken}</title>",
            f"<desc>{words}</desc>",
            f"<style>{theme.style()}</style>",
            (
                f'<rect class="paper" x="{_n(view.left)}" y="{_n(view.top)}"'
                f' width="{_n(view.width)}" height="{_n(view.height)}"/>'
            ),
            *([heading] if picture.title else []),
            *body,
            *legend,
            "</svg>\n",
        ]
    )


def _by_tail(picture: Picture) -> dict[str, list[DrawnEdge]]:
    wires: dict[str, list[DrawnEdge]] = {}
    for wire in picture.wires:
        wires.setdefault(wire.tail, []).append(wire)
    return wires


def _labels(wires: Sequence[DrawnEdge]) -> tuple[list[str], list[str]]:
    """Lines over and under the trunk: one label where all streams carry the same new columns, else
    two.
    """
    kinds = [kind for kind in dict.fromkeys(wire.added for wire in wires) if kind]
    if len(kinds) > 2:
        kinds = [tuple(dict.fromkeys(name for kind in kinds for name in kind))]
    lines = [column_lines(kind) for kind in kinds] + [[], []]
    return lines[0], lines[1]


def _size(
    box: OperatorBox,
    wires: Sequence[DrawnEdge],
    labels: tuple[list[str], list[str]],
    stream: float,
    indent: float,
) -> Size:
    above, below = labels
    width = max(
        [
            sans_width(shorten(box.name, NAME_LENGTH), NAME),
            sans_width(shorten(box.subtitle, NAME_LENGTH), SMALL),
        ]
        + [mono_width(line, CODE) for line in box.knobs]
    )
    height = (
        2 * 10 + 14 + (13 if box.subtitle else 0) + (len(box.knobs) * LINE + 8 if box.knobs else 0)
    )
    streams = (len({wire.stream for wire in wires}) - 1) / 2 * stream if wires else 0.0
    text = max([mono_width(line, CODE) for line in (*above, *below)], default=0.0)
    return Size(
        width=max(width + 2 * PAD + 4, 76.0),
        height=height,
        trunk=text + indent + 8 if text else 8.0 * bool(wires),
        label_above=len(above) * 11.5 + 8 + streams if above else 0.0,
        label_below=len(below) * 11.5 + 8 + streams if below else 0.0,
    )


def _box(number: int, box: OperatorBox, rect: Rect) -> str:
    x, y = rect.left + PAD + 4, rect.top + 10 + 11
    doc = " ".join(box.about.partition(">>>")[0].split())  # without the example
    parts = [
        (
            f'<g class="node {box.role}"'
            f' data-node="{number}"><title>{xml(f"{box.name}: {doc}")}</title>'
        ),
        (
            f'<rect class="box" x="{_n(rect.left)}" y="{_n(rect.top)}" width="{_n(rect.width)}" '
            f'height="{_n(rect.height)}" rx="6"/>'
        ),
        (
            f'<path class="accent" d="M{_n(rect.left + 5)} {_n(rect.top)}a5 5 0 0 0 -5'
            f' 5v{_n(rect.height - 10)}a5 5 0 0 0 5 5z"/>'
        ),
        f'<text class="name" x="{_n(x)}" y="{_n(y)}">{xml(shorten(box.name, NAME_LENGTH))}</text>',
    ]
    if box.subtitle:
        y += 13
        parts.append(
            f'<text class="kind" x="{_n(x)}"'
            f' y="{_n(y)}">{xml(shorten(box.subtitle, NAME_LENGTH))}</text>'
        )
    if box.knobs:
        parts.append(
            f'<line class="rule" x1="{_n(x)}" x2="{_n(rect.right - PAD)}" y1="{_n(y + 8)}"'
            f' y2="{_n(y + 8)}"/>'
        )
        y += 8
    for knob in box.knobs:
        y += LINE
        parts.append(f'<text class="knob" x="{_n(x)}" y="{_n(y)}">{_knob(knob)}</text>')
    return "".join([*parts, "</g>"])


def _knob(line: str) -> str:
    name, equals, value = line.partition("=")
    return f'{xml(name)}{equals}<tspan class="value">{xml(value)}</tspan>' if equals else xml(line)


def _columns(
    rect: Rect, size: Size, lines: tuple[Sequence[str], Sequence[str]], indent: float
) -> str:
    (above, below), x, parts = lines, rect.right + indent, []
    for at, line in enumerate(above):
        y = rect.middle - size.label_above + 11.5 * (at + 1) - 2
        parts.append(f'<text class="column" x="{_n(x)}" y="{_n(y)}">{xml(line)}</text>')
    for at, line in enumerate(below):
        y = rect.middle + size.label_below - 11.5 * (len(below) - 1 - at)
        parts.append(f'<text class="column" x="{_n(x)}" y="{_n(y)}">{xml(line)}</text>')
    return "".join(parts)


def _link(wire: DrawnEdge, points: Sequence[Point], colour: str) -> str:
    end = points[-1]
    drawn = [*points[:-1], (end[0] - ARROW, end[1])]
    path = f"M{_n(drawn[0][0])} {_n(drawn[0][1])}"
    for (x0, y0), (x1, y1) in pairwise(drawn):
        if abs(y1 - y0) < 0.05:
            path += f"H{_n(x1)}"
        else:
            middle = (x0 + x1) / 2
            path += f"C{_n(middle)} {_n(y0)} {_n(middle)} {_n(y1)} {_n(x1)} {_n(y1)}"
    text = f"{wire.tail} → {wire.head} ({wire.stream}): {', '.join(wire.columns)}"
    head = f"M{_n(end[0])} {_n(end[1])}l{_n(-ARROW - 1)} -3.4v6.8z"
    return (
        f'<g class="link {colour}"><title>{xml(text)}</title><path class="line" d="{path}"/>'
        f'<path class="tip" d="{head}"/></g>'
    )


def _back(text: str, route: BackRoute) -> str:
    points = list(route.points)
    (x, y), before = points[-1], points[-2]
    up = 1.0 if before[1] > y else -1.0
    points[-1] = (x, y + up * ARROW)
    path = f"M{_n(points[0][0])} {_n(points[0][1])}"
    for previous, corner, following in zip(points, points[1:], points[2:], strict=False):
        path += _rounded(previous, corner, following)
    path += f"L{_n(points[-1][0])} {_n(points[-1][1])}"
    head = f"M{_n(x)} {_n(y)}l-3.4 {_n(up * (ARROW + 1))}h6.8z"
    return (
        f'<g class="weights"><title>{xml(text)}</title><path class="line" d="{path}"/>'
        f'<path class="tip" d="{head}"/></g>'
    )


def _rounded(previous: Point, corner: Point, following: Point) -> str:
    radius = 9.0
    for neighbour in (previous, following):
        radius = min(radius, (abs(neighbour[0] - corner[0]) + abs(neighbour[1] - corner[1])) / 2)
    ends = []
    for neighbour in (previous, following):
        length = max(abs(neighbour[0] - corner[0]) + abs(neighbour[1] - corner[1]), 1e-9)
        ends.append(
            tuple(c + (o - c) * radius / length for o, c in zip(neighbour, corner, strict=True))
        )
    (ax, ay), (bx, by) = ends
    return f"L{_n(ax)} {_n(ay)}Q{_n(corner[0])} {_n(corner[1])} {_n(bx)} {_n(by)}"


def _back_label(label: str, at: Point) -> str:
    width = mono_width(label, CODE) + 12
    return (
        f'<g class="weights"><rect class="plate" x="{_n(at[0] - width / 2)}" y="{_n(at[1] - 8)}" '
        f'width="{_n(width)}" height="16" rx="8"/>'
        f'<text class="note" x="{_n(at[0])}" y="{_n(at[1] + 3.3)}">{xml(label)}</text></g>'
    )


def _widened(picture: Picture, layout: DrawnLayout, sizes: dict[str, Size]) -> dict[str, Size]:
    """Boxes that must be wider, because the frame around them is too narrow for its label."""
    wider: dict[str, Size] = {}
    for frame in picture.frames:
        needed = (
            max(
                sans_width(shorten(text, FRAME_LENGTH), SMALL)
                for text in (frame.label, frame.where)
            )
            + 20
        )
        for piece in _pieces(frame.nodes, layout, _title(picture)):
            if piece.width < needed:
                name = next(name for name in frame.nodes if layout.boxes[name].touches(piece))
                room = layout.boxes[name].width + needed - piece.width
                wider[name] = replace(sizes[name], width=room)
    return wider


def _title(picture: Picture) -> float:
    """Height of what stands at the top of a frame: its label, and in a run over hosts where it
    is.
    """
    return FRAME_TITLE + FRAME_PLACE * any(frame.where for frame in picture.frames)


def _pieces(nodes: Sequence[str], layout: DrawnLayout, title: float) -> list[Rect]:
    members = [layout.boxes[name] for name in nodes]
    outsiders = [rect for name, rect in layout.boxes.items() if name not in set(nodes)]
    rects = frame_pieces(members, outsiders, reach=300.0)
    return [piece.grown(FRAME_PAD, FRAME_PAD + title - 3, FRAME_PAD) for piece in rects]


def frame_pieces(members: Sequence[Rect], outsiders: Sequence[Rect], reach: float) -> list[Rect]:
    """Rectangles that cover the members, merged where they are within `reach` and hold none of the
    others.
    """
    rects = list(members)
    while len(members) <= MOST_MERGED:
        rects.sort(key=lambda rect: (rect.left, rect.top))
        merging = (
            (first, second)
            for first, second in combinations(rects, 2)
            if first.grown(reach, reach, reach).touches(second)
            and not any(first.union(second).touches(other) for other in outsiders)
        )
        pair = next(merging, None)
        if pair is None:
            break
        rects = [rect for rect in rects if rect is not pair[0] and rect is not pair[1]]
        rects.append(pair[0].union(pair[1]))
    return rects


def _frame(shade: int, frame: DeviceFrame, rect: Rect) -> str:
    label = " · ".join(filter(None, (frame.label, frame.where)))
    return (
        f'<g class="frame frame{shade % len(theme.LIGHT_FRAMES)}"><title>{xml(label)}</title>'
        f'<rect x="{_n(rect.left)}" y="{_n(rect.top)}" width="{_n(rect.width)}" '
        f'height="{_n(rect.height)}" rx="10"/></g>'
    )


def _frame_label(shade: int, frame: DeviceFrame, rect: Rect) -> str:
    texts = [
        f'<text{kind} x="{_n(rect.left + 10)}" y="{_n(rect.top + 14 + at * FRAME_PLACE)}">'
        f"{xml(shorten(text, FRAME_LENGTH))}</text>"
        for at, (kind, text) in enumerate((("", frame.label), (' class="place"', frame.where)))
        if text
    ]
    return f'<g class="frame frame{shade % len(theme.LIGHT_FRAMES)}">{"".join(texts)}</g>'


def _legend(picture: Picture, x: float, y: float) -> tuple[list[str], float]:
    entries = []
    if len(picture.streams) > 1:
        entries = [
            (f"link stream{at % len(theme.LIGHT_STREAMS)}", f"rows of {stream}")
            for at, stream in enumerate(picture.streams[:8])
        ]
    if picture.loops and entries:
        entries.append(("weights", "weights"))
    drawn, start = [], x
    for colour, text in entries:
        drawn.append(
            f'<g class="{colour}"><path class="line" d="M{_n(x)} {_n(y)}h26"/></g><text'
            f' class="legend" x="{_n(x + 33)}" y="{_n(y + 3.5)}">{xml(shorten(text, 40))}</text>'
        )
        x += 33 + sans_width(shorten(text, 40), 10.5) + 22
    return drawn, x - start


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


# The graph as one page without network: the picture to pan and zoom, and a panel that shows an
# operator.


Columns: TypeAlias = dict[str, str]


def render_html(picture: Picture) -> str:
    """The HTML page of a picture."""
    facts = [_facts(picture, box) for box in picture.boxes]
    # In a script element only "<" could end it early; as an escape it is the same JSON.
    data = json.dumps(facts, ensure_ascii=True).replace("<", "\\u003c")
    return Template(_part("page.html")).substitute(
        title=xml(picture.title or "dataflow graph"),
        style=_part("page.css"),
        svg=render(picture),
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
