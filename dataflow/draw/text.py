"""The graph in two languages of other tools: DOT for Graphviz, Mermaid for Markdown pages."""

from collections.abc import Sequence

import networkx as nx

from dataflow.draw.picture import DeviceFrame, OperatorBox, Picture, column_lines
from dataflow.draw.theme import LIGHT, LIGHT_FRAMES, LIGHT_STREAMS, dot, mermaid, yaml

_SHAPES = {"source": ("([", "])"), "sink": ("[/", "/]"), "trainer": ("[[", "]]")}


def to_dot(picture: Picture) -> str:
    """DOT source; frames become clusters, weights dashed edges that do not bend the order."""
    lines = [f'digraph "{dot(picture.title or "dataflow")}" {{']
    lines += [
        "  rankdir=LR;",
        '  node [shape=box style="rounded" fontname="Helvetica" fontsize=11];',
    ]
    lines.append('  edge [fontname="Courier" fontsize=9 color="#59636e" fontcolor="#59636e"];')
    if picture.title:
        lines.append(
            f'  labelloc=t; labeljust=l; label="{dot(picture.title)}"; fontname="Helvetica";'
        )
    for box in picture.boxes:
        lines.append(f'  "{dot(box.name)}" [label="{dot(_label(box))}" color="{LIGHT[box.role]}"];')
    for cluster, (number, frame, nodes) in enumerate(_clusters(picture)):
        inside = " ".join(f'"{dot(name)}";' for name in nodes)
        colour = _cycle(LIGHT_FRAMES, picture.shades[number])
        lines.append(
            f'  subgraph "cluster_{cluster}" {{ label="{dot(_where(frame))}"; color="{colour}"; '
            f'fontname="Helvetica"; {inside} }}'
        )
    many = len(picture.streams) > 1
    for wire in picture.wires:
        label = "\n".join(column_lines(wire.added))
        paint = (
            f' color="{_cycle(LIGHT_STREAMS, picture.streams.index(wire.stream))}"' if many else ""
        )
        hint = dot(f"{wire.stream}: {', '.join(wire.columns)}")
        lines.append(
            f'  "{dot(wire.tail)}" -> "{dot(wire.head)}" [label="{dot(label)}"{paint}'
            f' tooltip="{hint}"];'
        )
    for loop in picture.loops:
        colour = LIGHT["weights"]
        lines.append(
            f'  "{dot(loop.tail)}" -> "{dot(loop.head)}" [label="{dot(loop.label)}" style=dashed '
            f'constraint=false color="{colour}" fontcolor="{colour}"];'
        )
    return "\n".join([*lines, "}\n"])


def to_mermaid(picture: Picture) -> str:
    """A Mermaid flowchart; frames become subgraphs, weights dotted edges."""
    names = {box.name: f"n{number}" for number, box in enumerate(picture.boxes)}
    lines = ["flowchart LR"]
    if picture.title:
        lines = ["---", f"title: {yaml(picture.title)}", "---", *lines]
    for box in picture.boxes:
        before, after = _SHAPES.get(box.role, ("[", "]"))
        label = "<br/>".join(mermaid(line) for line in _label(box).split("\n"))
        lines.append(f'  {names[box.name]}{before}"{label}"{after}')
    for cluster, (_, frame, nodes) in enumerate(_clusters(picture)):
        inside = [f"    {names[name]}" for name in nodes]
        label = "<br/>".join(mermaid(line) for line in _where(frame).split("\n"))
        lines += [f'  subgraph f{cluster}["{label}"]', *inside, "  end"]
    edges = 0
    styles: list[str] = []
    for wire in picture.wires:
        label = "<br/>".join(mermaid(line) for line in column_lines(wire.added))
        lines.append(f"  {names[wire.tail]} -->{_quoted(label)} {names[wire.head]}")
        if len(picture.streams) > 1:
            styles.append(
                f"  linkStyle {edges}"
                f" stroke:{_cycle(LIGHT_STREAMS, picture.streams.index(wire.stream))}"
            )
        edges += 1
    for loop in picture.loops:
        lines.append(f"  {names[loop.tail]} -.->{_quoted(mermaid(loop.label))} {names[loop.head]}")
        styles.append(f"  linkStyle {edges} stroke:{LIGHT['weights']}")
        edges += 1
    return "\n".join([*lines, *styles]) + "\n"


def to_plain(picture: Picture) -> str:
    """A few lines for a terminal: each operator and what it sends where."""
    after: dict[str, dict[str, None]] = {}
    for wire in picture.wires:
        after.setdefault(wire.tail, {})[wire.head] = None
    streams = ", ".join(picture.streams) or "none"
    lines = [f"{picture.title or 'graph'}: {len(picture.boxes)} operators, streams {streams}"]
    for box in picture.boxes:
        to = ", ".join(after.get(box.name, {}))
        lines.append(f"  {box.name}" + (f" -> {to}" if to else ""))
    lines += [f"  {loop.tail} ~> {loop.head} ({loop.label})" for loop in picture.loops]
    return "\n".join(lines)


def _label(box: OperatorBox) -> str:
    return "\n".join([box.name, *([box.subtitle] if box.subtitle else []), *box.knobs])


def _where(frame: DeviceFrame) -> str:
    return "\n".join(filter(None, (frame.label, frame.where)))


def _clusters(picture: Picture) -> list[tuple[int, DeviceFrame, list[str]]]:
    """Frames (with their number) in linked pieces, each node in the first that names it."""
    linked: nx.Graph[str] = nx.Graph()
    linked.add_nodes_from(box.name for box in picture.boxes)
    linked.add_edges_from((wire.tail, wire.head) for wire in picture.wires)
    framed: set[str] = set()
    clusters = []
    for number, frame in enumerate(picture.frames):
        names = [name for name in dict.fromkeys(frame.nodes) if name not in framed]
        framed.update(names)
        pieces = nx.connected_components(linked.subgraph(names))
        for piece in sorted(pieces, key=lambda piece: min(map(names.index, piece))):
            clusters.append((number, frame, [name for name in names if name in piece]))
    return clusters


def _cycle(palette: Sequence[str], number: int) -> str:
    return palette[number % len(palette)]


def _quoted(label: str) -> str:
    return f'|"{label}"|' if label else ""
