"""Pictures: the layout's geometry, what each format shows, and that no name can break out of its
place.
"""

import itertools
import json
import math
import re
from dataclasses import dataclass
from functools import partial
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import networkx as nx
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples

from dataflow.draw import DeviceFrame, draw, mimebundle, render_svg, reward_curve_svg
from dataflow.draw.charts import timeline_svg
from dataflow.draw.geometry import BackEdge, ForwardEdge, Rect, Size
from dataflow.draw.layout import arrange
from dataflow.draw.picture import read
from dataflow.errors import GraphError
from dataflow.model import Model
from dataflow.node import Learn, Operator, Sink, Source, Transform

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True, eq=False)
class Prompts(Source):
    """Rows of a file."""

    path: str = ""


@dataclass(frozen=True, eq=False)
class Generator(Transform):
    """Writes <rollouts> & more."""

    model: Any = None
    group_size: int = 1


@dataclass(frozen=True, eq=False)
class Score(Transform):
    light: ClassVar[bool] = True
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    e: int = 0
    f: int = 0


@dataclass(frozen=True, eq=False)
class Train(Learn):
    model: Any = None
    loss: Any = None


@dataclass(frozen=True, eq=False)
class Evaluate(Sink):
    pass


def data(graph: nx.MultiDiGraph, tail: str, head: str, stream: str, *added: str) -> None:
    columns = {name: pa.float64() for name in ("prompt", *added)}
    graph.add_edge(
        tail, head, key=stream, plane="data", stream=stream, columns=columns, added=added
    )


def weights(graph: nx.MultiDiGraph, tail: str, head: str, model: Model, max_staleness: int) -> None:
    graph.add_edge(
        tail, head, key="weights", plane="weights", model=model, max_staleness=max_staleness
    )


def nodes(graph: nx.MultiDiGraph, *operators: Operator) -> None:
    for operator in operators:
        graph.add_node(operator.name, operator=operator)


def aipo_with_evaluation() -> nx.MultiDiGraph:
    graph, model = nx.MultiDiGraph(), Model("runs/policy")
    nodes(
        graph,
        Prompts("train.jsonl", name="prompts"),
        Prompts("test.jsonl", name="held_out"),
        Generator(model, 8, name="generator"),
        Score(name="reward"),
        Score(name="advantage"),
        Train(model, partial(max, default=4.0), name="trainer"),
        Evaluate(name="evaluate"),
    )
    for stream in ("prompts", "held_out"):
        data(graph, stream, "generator", stream, "prompt", "group_id")
        data(
            graph,
            "generator",
            "reward",
            stream,
            "completion",
            "tokens",
            "logprobs",
            "versions",
            "mask",
        )
    data(graph, "reward", "advantage", "prompts", "reward")
    data(graph, "reward", "evaluate", "held_out", "reward")
    data(graph, "advantage", "trainer", "prompts", "advantage")
    weights(graph, "trainer", "generator", model, 4)
    return graph


def texts(svg: str, kind: str = "") -> list[str]:
    found = ElementTree.fromstring(svg).iter(f"{SVG}text")
    return [
        "".join(text.itertext()) for text in found if not kind or kind in (text.get("class") or "")
    ]


# --- the layout


@st.composite
def drawings(draw_from: st.DrawFn) -> tuple[dict[str, Size], list[ForwardEdge], list[BackEdge]]:
    count = draw_from(st.integers(1, 14))
    length = st.floats(20, 160)
    sizes = {
        f"n{at}": Size(
            width=draw_from(length),
            height=draw_from(length),
            trunk=draw_from(st.sampled_from([0.0, 60.0])),
            label_above=draw_from(st.sampled_from([0.0, 50.0])),
        )
        for at in range(count)
    }
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1), st.integers(0, 2))
    chosen = draw_from(st.lists(pairs, max_size=24, unique=True))
    links = [
        ForwardEdge(tail=f"n{a}", head=f"n{b}", stream=stream) for a, b, stream in chosen if a < b
    ]
    chosen = draw_from(st.lists(pairs, max_size=3, unique_by=lambda pair: pair[:2]))
    backs = [BackEdge(tail=f"n{a}", head=f"n{b}", label_width=90) for a, b, _ in chosen if a > b]
    return sizes, links, backs


def stretches(points: tuple[tuple[float, float], ...]) -> list[Rect]:
    """For each piece of a path the rectangle it stays in."""
    return [
        Rect(left=min(x0, x1), right=max(x0, x1), top=min(y0, y1) - 1e-6, bottom=max(y0, y1) + 1e-6)
        for (x0, y0), (x1, y1) in itertools.pairwise(points)
    ]


@examples(150)
@given(drawings())
def test_boxes_never_overlap_and_no_edge_runs_through_a_box(
    drawing: tuple[dict[str, Size], list[ForwardEdge], list[BackEdge]],
) -> None:
    sizes, links, backs = drawing
    layout = arrange(sizes, links, backs)
    for one, other in itertools.combinations(layout.boxes.values(), 2):
        assert not one.touches(other)
    paths = [*layout.links, *(route.points for route in layout.backs)]
    for path, box in itertools.product(paths, layout.boxes.values()):
        smaller = Rect(
            left=box.left + 0.01,
            right=box.right - 0.01,
            top=box.top + 0.01,
            bottom=box.bottom - 0.01,
        )
        assert not any(stretch.touches(smaller) for stretch in stretches(path))


@examples(60)
@given(drawings())
def test_every_link_flows_to_the_right_from_its_tail_to_its_head(
    drawing: tuple[dict[str, Size], list[ForwardEdge], list[BackEdge]],
) -> None:
    sizes, links, backs = drawing
    layout = arrange(sizes, links, backs)
    assert arrange(sizes, links, backs) == layout
    for link, points in zip(links, layout.links, strict=True):
        tail, head = layout.boxes[link.tail], layout.boxes[link.head]
        assert points[0][0] == tail.right and tail.top <= points[0][1] <= tail.bottom
        assert points[-1][0] == head.left and head.top <= points[-1][1] <= head.bottom
        assert all(a[0] <= b[0] for a, b in itertools.pairwise(points))
    for back, route in zip(backs, layout.backs, strict=True):
        assert inside(layout.bounds, *route.points, route.label)
        assert on_border(layout.boxes[back.tail], route.points[0])
        assert on_border(layout.boxes[back.head], route.points[-1])


def inside(rect: Rect, *points: tuple[float, float]) -> bool:
    return all(rect.left <= x <= rect.right and rect.top <= y <= rect.bottom for x, y in points)


def on_border(rect: Rect, point: tuple[float, float]) -> bool:
    return rect.left < point[0] < rect.right and point[1] in (rect.top, rect.bottom)


# --- what a picture shows


def test_svg_shows_operators_knobs_new_columns_and_staleness() -> None:
    svg = render_svg(aipo_with_evaluation(), title="AIPO")
    assert texts(svg, "name") == [
        "prompts",
        "held_out",
        "generator",
        "reward",
        "advantage",
        "trainer",
        "evaluate",
    ]
    assert "group_size=8" in texts(svg, "knob") and "loss=max(default=4)" in texts(svg, "knob")
    assert "…+2" in texts(svg, "column") and "completion" in texts(svg, "column")
    assert texts(svg, "note") == ["policy · max_staleness=4"]
    assert texts(svg, "legend") == ["rows of prompts", "rows of held_out", "weights"]
    assert texts(svg, "heading") == ["AIPO"]


def test_frames_are_drawn_in_each_format_and_unknown_nodes_ignored(tmp_path: Path) -> None:
    frames = [
        DeviceFrame("gpu 0-5", ("generator", "ghost")),
        DeviceFrame("cpu x1", ("prompts", "reward", "advantage")),
    ]
    graph = aipo_with_evaluation()
    svg = render_svg(graph, frames)
    root = ElementTree.fromstring(svg)
    framed = [
        group for group in root.iter(f"{SVG}g") if (group.get("class") or "").startswith("frame")
    ]
    labels = ["".join(text.itertext()) for group in framed for text in group.iter(f"{SVG}text")]
    assert sorted(labels) == ["cpu x1", "cpu x1", "gpu 0-5"]
    assert draw(graph, tmp_path / "g.dot", frames).read_text().count("subgraph") == 3
    assert draw(graph, tmp_path / "g.mmd", frames).read_text().count("subgraph") == 3
    assert "ghost" not in svg


def test_frames_say_their_hosts_on_a_line_of_their_own_and_those_of_one_place_have_one_colour(
    tmp_path: Path,
) -> None:
    where = {"generator": "hosts a and b", "prompts": "host a", "trainer": "hosts a and b"}
    frames = [DeviceFrame(f"{name} · 2 GPUs", (name,), place) for name, place in where.items()]
    graph = aipo_with_evaluation()
    root = ElementTree.fromstring(render_svg(graph, frames))
    framed = [
        group for group in root.iter(f"{SVG}g") if (group.get("class") or "").startswith("frame")
    ]
    titles = [
        (group.get("class"), *group.iter(f"{SVG}text"))
        for group in framed
        if list(group.iter(f"{SVG}text"))
    ]
    assert {label.text: (shade, place.text) for shade, label, place in titles} == {
        "generator · 2 GPUs": ("frame frame0", "hosts a and b"),
        "prompts · 2 GPUs": ("frame frame1", "host a"),
        "trainer · 2 GPUs": ("frame frame0", "hosts a and b"),
    }
    assert all(float(place.get("y", 0)) > float(label.get("y", 0)) for _, label, place in titles)
    assert (
        "generator · 2 GPUs\\nhosts a and b" in draw(graph, tmp_path / "g.dot", frames).read_text()
    )
    assert (
        "generator · 2 GPUs<br/>hosts a and b"
        in draw(graph, tmp_path / "g.mmd", frames).read_text()
    )
    assert "hosts a and b" in draw(graph, tmp_path / "g.html", frames).read_text()


def test_the_same_graph_gives_the_same_bytes() -> None:
    assert render_svg(aipo_with_evaluation()) == render_svg(aipo_with_evaluation())


def test_a_thousand_operators_are_drawn() -> None:
    graph = nx.MultiDiGraph()
    nodes(graph, *(Score(name=f"n{at}") for at in range(1000)))
    for at in range(1, 1000):
        data(graph, f"n{at * 7 // 8}", f"n{at}", "n0", f"c{at}")
    assert len(texts(render_svg(graph), "name")) == 1000


# --- files


def test_an_unknown_suffix_is_refused_with_the_four_known_ones(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"\.svg, \.dot, \.mmd or \.html, but got 'x\.png'"):
        draw(aipo_with_evaluation(), tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_a_notebook_gets_svg_and_text() -> None:
    bundle = mimebundle(aipo_with_evaluation(), title="aipo")
    assert set(bundle) == {"image/svg+xml", "text/plain"}
    assert "generator -> reward" in bundle["text/plain"]
    assert "trainer ~> generator (policy · max_staleness=4)" in bundle["text/plain"]


class Page(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: dict[str, str] = {}
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href")
        ]
        self._open = tag if dict(attrs).get("id") is None else dict(attrs)["id"] or ""

    def handle_data(self, data: str) -> None:
        self.texts[self._open] = self.texts.get(self._open, "") + data


def test_the_page_loads_nothing_and_knows_every_operator(tmp_path: Path) -> None:
    frames = [DeviceFrame("gpu 0-5", ("generator",))]
    page = Page(draw(aipo_with_evaluation(), tmp_path / "g.html", frames).read_text())
    assert page.links == []
    facts = {fact["name"]: fact for fact in json.loads(page.texts["data"])}
    generator = facts["generator"]
    assert generator["doc"] == "Writes <rollouts> & more."
    assert generator["knobs"] == {"model": "policy", "group_size": "8"}
    assert generator["devices"] == ["gpu 0-5"]
    assert generator["added"] == ["completion", "tokens", "logprobs", "versions", "mask"]
    assert generator["arriving"][0][0] == "columns in, rows of prompts, held_out"
    assert generator["arriving"][0][1] == {"prompt": "double", "group_id": "double"}


# --- names


def is_control(char: str) -> bool:
    """Whether XML forbids it."""
    return (
        (char < " " and char not in "\t\n\r")
        or "\ud800" <= char <= "\udfff"
        or char in "\ufffe\uffff"
    )


HOSTILE = st.one_of(
    st.text(min_size=1, max_size=12),
    st.sampled_from(
        [
            "</script><script>x",
            '"];a->b[label="',
            "<img src=x>",
            "a\\",
            'a\\"',
            "]]>",
            "#quot;",
            "end",
            "&amp;",
            "\x00",
        ]
    ),
)


@examples(60)
@given(st.lists(HOSTILE, min_size=2, max_size=4, unique=True), HOSTILE)
def test_no_name_breaks_out_of_any_format(names: list[str], text: str) -> None:
    graph = nx.MultiDiGraph()
    nodes(graph, *(Prompts(text, name=name) for name in names))
    for tail, head in itertools.pairwise(names):
        data(graph, tail, head, names[0], text)
    weights(graph, names[-1], names[0], Model("m", name=text), 1)
    frames = [DeviceFrame(text, (names[0],))]
    picture = read(graph, frames, text)

    svg = render_svg(graph, frames, text)
    root = ElementTree.fromstring(svg)
    allowed = {"svg", "title", "desc", "style", "rect", "g", "path", "text", "tspan", "line"}
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= allowed
    assert len(texts(svg, "name")) == len(names)

    from dataflow.draw import svg
    from dataflow.draw import text as languages

    page = Page(svg.render_html(picture))
    assert page.tags.count("script") == 2 and "img" not in page.tags
    assert [fact["name"] for fact in json.loads(page.texts["data"])] == names

    dot = languages.to_dot(picture)
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", dot, flags=re.DOTALL)
    assert '"' not in bare and bare.count("->") == len(names)
    assert bare.count("{") == bare.count("}") == 2

    chart = languages.to_mermaid(picture)
    if picture.title:
        title = chart.split("\n")[1].removeprefix("title: ")
        assert json.loads(title) == "".join(
            "\N{REPLACEMENT CHARACTER}" if is_control(c) else c for c in text
        )
        chart = chart.split("\n", 3)[3]
    for line in chart.splitlines():
        for label in re.findall(r'"([^"]*)"', line):
            assert not set(label.replace("<br/>", "")) & set("<>[](){}|\\`'&")
        assert line.count('"') in (0, 2)


# --- the curve


def test_the_curve_has_axes_a_legend_and_a_dot_per_evaluation() -> None:
    metrics = [{"step": step, "reward_mean": step / 100} for step in range(1, 61)]
    metrics += [{"step": step, "eval_accuracy": 0.2 + step / 200} for step in (0, 30, 60)]
    svg = reward_curve_svg(metrics, title="a <curve>")
    words = texts(svg)
    assert "a <curve>" in words and "step (optimiser updates)" in words
    assert {"reward, mean of a step", "its running mean", "accuracy on held-out prompts"} <= set(
        words
    )
    assert "0.20" in words and "0.50" in words
    assert svg.count("<circle") == 3


def boxes_and_points(
    svg: str,
) -> tuple[list[tuple[float, float, float, float]], list[list[tuple[float, float]]]]:
    """Where labels of the curve stand, on the narrow side, and what the lines run through."""
    root = ElementTree.fromstring(svg)
    boxes = []
    for each in root.iter(f"{SVG}text"):
        if "mark" in (kind := each.get("class") or ""):
            x, y, wide = (
                float(each.get("x") or 0),
                float(each.get("y") or 0),
                5.0 * len(each.text or ""),
            )
            left = x - wide if "end" in kind else x
            boxes.append((left, left + wide, y - 8, y))
    paths = [
        each.get("d") or "" for group in root.iter(f"{SVG}g") for each in group.iter(f"{SVG}path")
    ]
    lines = [re.findall(r"(-?[\d.]+) (-?[\d.]+)", path) for path in paths if "L" in path]
    return boxes, [[(float(x), float(y)) for x, y in line] for line in lines]


@pytest.mark.parametrize("rise", [-0.9, -0.3, 0.0, 0.3, 0.9])
@pytest.mark.parametrize("reward", [0.1, 0.5, 0.95])
def test_no_word_of_the_curve_lies_on_a_line(rise: float, reward: float) -> None:
    metrics = [
        {"step": step, "reward_mean": reward + 0.02 * math.sin(step)} for step in range(1, 61)
    ]
    low = max(0.0, -rise)
    metrics += [{"step": step, "eval_accuracy": low + rise * step / 60} for step in (0, 30, 60)]
    boxes, lines = boxes_and_points(
        reward_curve_svg(metrics, marks=[(20, "reward = strict"), (40, "trainer.lr = 1e-6")])
    )
    assert len(boxes) == 4 and len(lines) == 3
    for (left, right, top, bottom), line in itertools.product(boxes, lines):
        for (x0, y0), (x1, y1) in pairwise(line):
            for part in range(101):
                x, y = x0 + (x1 - x0) * part / 100, y0 + (y1 - y0) * part / 100
                assert not (left < x < right and top < y < bottom), "a line runs through it"
    for (a, b, c, d), (e, f, g, h) in itertools.combinations(boxes, 2):
        assert not (a < f and e < b and c < h and g < d), "two words stand on one place"


# --- the time line


def test_a_time_line_has_a_row_for_each_operator_its_share_and_a_line_for_each_step() -> None:
    spans = {
        "generator 0": [(0.0, 3.0), (3.001, 9.0)],
        "a <b>": [(2.0, 4.0)],
        "late": [(20.0, 30.0)],
    }
    svg = timeline_svg(spans, [1.0, 5.0, 9.0], "steps of <x>")
    root = ElementTree.fromstring(svg)
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"generator 0", "a <b>", "late", "100%", "25%", "0%", "steps of <x>", "seconds"} <= set(
        words
    )
    bars = [
        group.find(f"{SVG}path")
        for group in root.iter(f"{SVG}g")
        if "bar" in group.get("class", "")
    ]
    assert [bar.get("d", "").count("M") for bar in bars if bar is not None] == [1, 1]
    assert sum(path.get("class") == "grid" for path in root.iter(f"{SVG}path")) == 3
