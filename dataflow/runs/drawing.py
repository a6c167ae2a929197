"""The drawing of a run's graph, `graph.svg` of its folder, as plain lists of which nothing but
shapes and text is left; the live page, reports and notebooks show it.

A folder may come from anybody, and an SVG may hold programs: so it is read as XML, never handed on,
and what is no shape of our own drawings is left out.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias
from xml.etree import ElementTree

from dataflow.draw import theme
from dataflow.folder.run_folder import RunFolder
from dataflow.runs.texts import escaped
from dataflow.system.files import RunFolderError

MOST_BYTES = 8 << 20
MOST_ELEMENTS = 80_000
Shape: TypeAlias = list[Any]
"""[tag, {attribute: value}, [shapes and texts]]."""

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_PATH = re.compile(r"[-MLHVCQAZmlhvcqaz0-9., ]*")
_CLASSES = re.compile(r"[A-Za-z0-9 _-]*")
_BOX = re.compile(r"(-?\d+(\.\d+)? ){3}-?\d+(\.\d+)?")
TAGS = frozenset({"svg", "title", "desc", "g", "rect", "path", "line", "text", "tspan"})
ATTRIBUTES: Mapping[str, re.Pattern[str]] = {
    **dict.fromkeys(
        ("x", "y", "x1", "x2", "y1", "y2", "width", "height", "rx", "data-node"), _NUMBER
    ),
    "d": _PATH,
    "class": _CLASSES,
    "viewBox": _BOX,
}


def shapes(text: bytes) -> Shape | None:
    """The shapes of an SVG; None where it is none, or too large."""
    if len(text) > MOST_BYTES or b"<!DOCTYPE" in text or b"<!ENTITY" in text:
        return None
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return None
    if _tag(root) != "svg" or sum(1 for _ in root.iter()) > MOST_ELEMENTS:
        return None
    return _shape(root, 0)


def read_picture(folder: RunFolder) -> Shape | None:
    """The drawing in a folder; None where there is none that can be shown."""
    try:
        if folder.graph_svg.stat().st_size > MOST_BYTES:
            return None
        return shapes(folder.graph_svg.read_bytes())
    except (OSError, RunFolderError):
        return None


def svg_of(shape: Shape) -> str:
    """The same as SVG that may stand in a page: texts are escaped, with nothing in them that a
    reader could not see.
    """
    tag, attributes, inside = shape
    own = ' xmlns="http://www.w3.org/2000/svg" role="img"' if tag == "svg" else ""
    named = "".join(f' {name}="{value}"' for name, value in attributes.items())
    style = f"<style>{theme.style()}</style>" if tag == "svg" else ""
    content = "".join(
        svg_of(child) if isinstance(child, list) else escaped(child) for child in inside
    )
    return f"<{tag}{own}{named}>{style}{content}</{tag}>"


def name_edges(shape: Shape, graph: Mapping[str, Any]) -> None:
    """Give each line of the drawing the number of its edge in the graph, by what is written on it.

    A node's number, `data-node`, is its place in the graph already.
    """
    numbers = {_written(edge): str(number) for number, edge in enumerate(graph.get("edges", []))}
    for _, attributes, inside in _groups(shape):
        title = next(
            (
                child[2][0]
                for child in inside
                if isinstance(child, list) and child[0] == "title" and child[2]
            ),
            "",
        )
        if (number := numbers.get(str(title).partition(": ")[0])) is not None:
            attributes["data-edge"] = number


def _written(edge: Mapping[str, Any]) -> str:
    """What stands on its line before a colon."""
    ends = f"{edge.get('from')} → {edge.get('to')}"
    return ends if edge.get("plane") != "data" else f"{ends} ({edge.get('source')})"


def _groups(shape: Shape) -> Iterator[Shape]:
    for child in shape[2]:
        if isinstance(child, list):
            if child[0] == "g" and {"link", "weights"} & set(child[1].get("class", "").split()):
                yield child
            yield from _groups(child)


def _shape(element: "ElementTree.Element", depth: int) -> Shape:
    attributes = {
        name: value
        for name, value in element.attrib.items()
        if name in ATTRIBUTES and ATTRIBUTES[name].fullmatch(value)
    }
    inside: list[Any] = [element.text] if element.text and element.text.strip() else []
    for child in element:
        if depth < 8 and _tag(child) in TAGS - {"svg"}:
            inside.append(_shape(child, depth + 1))
            inside += [child.tail] if child.tail and child.tail.strip() else []
    return [_tag(element), attributes, inside]


def _tag(element: "ElementTree.Element") -> str:
    tag = element.tag
    return tag.removeprefix("{http://www.w3.org/2000/svg}") if isinstance(tag, str) else ""
