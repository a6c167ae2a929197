"""Charts as SVG: axes, lines, bars, timelines, and the curve of a run's reward."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from dataflow.draw import theme
from dataflow.draw.theme import sans_width, xml
from dataflow.records import AnyArray

# What every chart is wrapped in: the size, the title, the style sheet for light pages and dark
# ones.


_CHART = (
    ".dataflow-graph .end{text-anchor:end}.dataflow-graph"
    " .middle{text-anchor:middle}.dataflow-graph .changed{stroke-dasharray:4 3}.dataflow-graph"
    " .mark{font-size:11px;font-weight:600}.dataflow-graph"
    " .said{font-size:10.5px;font-weight:400}.dataflow-graph"
    " .line{stroke-linejoin:round;stroke-width:2}.dataflow-graph .raw"
    " .line{stroke-width:1;stroke-opacity:.4}.dataflow-graph .bar"
    " .line{stroke-width:14;stroke-linecap:butt}"
)


def document(width: float, height: float, title: str, body: Sequence[str]) -> str:
    """A whole SVG of these elements."""
    return "\n".join(
        [
            (
                '<svg xmlns="http://www.w3.org/2000/svg" class="dataflow-graph" role="img" '
                f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">'
            ),
            f"<title>{xml(title)}</title>",
            f"<style>{theme.style()}{_CHART}</style>",
            f'<rect class="paper" width="{width:g}" height="{height:g}"/>',
            *body,
            "</svg>\n",
        ]
    )


# Long series as few points, so that nothing that stands out is lost; pure.


LEAST_POINTS = 4


def decimate(xs: AnyArray, ys: AnyArray, most: int) -> tuple[AnyArray, AnyArray]:
    """At most `most` of the points of a series, which is finite and whose xs do not fall.

    The first and the last stay, and of each of as many stretches of equal count the least and the
    greatest, in their order. most: 4 or more.
    """
    count = len(xs)
    if count <= most:
        return xs, ys
    stretches = (most - 2) // 2
    edges = 1 + np.arange(stretches + 1) * (count - 2) // stretches
    indices = {0, count - 1}
    for begin, end in pairwise(edges):
        if begin < end:
            indices.add(int(begin + np.argmin(ys[begin:end])))
            indices.add(int(begin + np.argmax(ys[begin:end])))
    chosen = np.array(sorted(indices))
    return xs[chosen], ys[chosen]


def running_mean(ys: AnyArray) -> AnyArray:
    """Of a series, over about a twentieth of its points."""
    half = max(len(ys) // 40, 2)
    sums = np.concatenate([[0.0], np.cumsum(ys, dtype=np.float64)])
    at = np.arange(len(ys))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(ys))
    means: AnyArray = (sums[high] - sums[low]) / (high - low)
    return means


# What charts share: round numbers along an axis, running means, and fewer points than there are
# pixels.


MOST_POINTS = 1_500
Point = tuple[float, float]


def smooth(series: Sequence[Point]) -> list[Point]:
    """Its running mean."""
    means = running_mean(np.array([value for _, value in series], np.float64))
    return [(step, mean) for (step, _), mean in zip(series, means.tolist(), strict=True)]


def thin(series: Sequence[Point]) -> list[Point]:
    """As few of the points as a picture can show: both ends, and what stands out."""
    if len(series) <= MOST_POINTS:
        return list(series)
    points = np.array(series, np.float64)
    xs, ys = decimate(points[:, 0], points[:, 1], MOST_POINTS)
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


def ticks(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """Round numbers that enclose low and high."""
    # A span that floats cannot divide is widened.
    high = max(high, low + 1e-6 * max(abs(low), abs(high)), low + 1e-9)
    raw = (high - low) / about
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    if whole:
        step = max(math.ceil(step), 1)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [at * step for at in range(first, last + 1)]


def figure(value: float) -> str:
    """As it stands at an axis."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.10g}"


WIDTH, HEIGHT = 420.0, 220.0
SMOOTHED = 20
"""From so many points on, a running mean is drawn over them."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 16.0, 36.0, 34.0
_LEGEND = 26.0
_COLUMNS = 2


@dataclass(frozen=True)
class Line:
    """One series."""

    name: str
    points: Sequence[Point]
    """Finite, ascending in their steps."""
    stream: int = 0
    """Number of its colour."""


@dataclass(frozen=True)
class Chart:
    """One small picture."""

    title: str
    lines: Sequence[Line]
    from_zero: bool = False
    """Whether its axis begins at 0."""
    dots: bool = False
    """Whether each point is marked: there are few."""
    marks: Sequence[tuple[float, str]] = ()
    """Steps after which something changed, and what."""


def chart_svg(chart: Chart) -> str:
    """One chart; where it has several lines, their names stand below it."""
    legend = _legend(chart.lines) if len(chart.lines) > 1 else []
    height = HEIGHT + (_LEGEND if legend else 0.0)
    placed = (
        [f'<g transform="translate({_LEFT:g} {HEIGHT + 8:g})">{"".join(legend)}</g>']
        if legend
        else []
    )
    return document(WIDTH, height, chart.title, [*_body(chart), *placed])


def charts_svg(charts: Sequence[Chart], title: str) -> str:
    """Several in one picture, with the names of the lines above them."""
    rows = -(-len(charts) // _COLUMNS)
    width, top = WIDTH * min(_COLUMNS, max(len(charts), 1)), 66.0
    named = {line.stream: line for chart in charts for line in chart.lines}
    body = [f'<text class="heading" x="20" y="28">{xml(title)}</text>']
    body.append(
        '<g transform="translate(20'
        f' 50)">{"".join(_legend([named[stream] for stream in sorted(named)]))}</g>'
    )
    for number, chart in enumerate(charts):
        x, y = number % _COLUMNS * WIDTH, top + number // _COLUMNS * HEIGHT
        body.append(f'<g transform="translate({x:g} {y:g})">{"".join(_body(chart))}</g>')
    return document(width, top + rows * HEIGHT + 8, title, body)


def _body(chart: Chart) -> list[str]:
    body = [f'<text class="name" x="{_LEFT:g}" y="22">{xml(chart.title)}</text>']
    points = [point for line in chart.lines for point in line.points]
    if not points:
        return [*body, f'<text class="axis" x="{_LEFT:g}" y="{HEIGHT / 2:g}">no figures</text>']
    values = [value for _, value in points]
    ys = ticks(min(0.0, *values) if chart.from_zero else min(values), max(values), 4)
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    span = max(last - first, 1.0)

    def place(point: Point) -> Point:
        x = _LEFT + (WIDTH - _LEFT - _RIGHT) * (point[0] - first) / span
        return x, HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (point[1] - ys[0]) / (
            ys[-1] - ys[0]
        )

    xs = [tick for tick in ticks(first, last, 5, whole=True) if first <= tick <= last]
    body += _axes(xs, ys, place, _LEFT, WIDTH - _RIGHT)
    for step, label in chart.marks:
        x = place((min(max(step, first), last), ys[0]))[0]
        body.append(
            f'<path class="grid changed" d="M{x:.1f}'
            f' {_TOP:g}V{HEIGHT - _BOTTOM:g}"><title>{xml(label)}</title></path>'
        )
    for line in chart.lines:
        body += _drawn(
            line, [place(point) for point in thin(line.points)] if line.points else [], chart.dots
        )
        if len(line.points) >= SMOOTHED and not chart.dots:
            body.append(_path(_stream(line), [place(point) for point in thin(smooth(line.points))]))
    return body


def _axes(
    xs: Sequence[float],
    ys: Sequence[float],
    place: Callable[[Point], Point],
    left: float,
    right: float,
) -> list[str]:
    """A line across for each of the values, which stands left of it; steps below them."""
    body = []
    for tick in ys:
        y = place((0.0, tick))[1]
        body.append(f'<path class="grid" d="M{left:g} {y:.1f}H{right:g}"/>')
        body.append(
            f'<text class="axis end" x="{left - 8:g}" y="{y + 3.6:.1f}">{figure(tick)}</text>'
        )
    for tick in xs:
        x, bottom = place((tick, ys[0]))
        body.append(
            f'<text class="axis middle" x="{x:.1f}" y="{bottom + 17:g}">{figure(tick)}</text>'
        )
    return body


def _drawn(line: Line, places: Sequence[Point], dots: bool) -> list[str]:
    if not places:
        return []
    many = len(line.points) >= SMOOTHED and not dots
    drawn = [_path(f"raw {_stream(line)}" if many else _stream(line), places)]
    if dots or len(places) == 1:
        tips = [f'<circle class="tip" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
        drawn.append(f'<g class="{_stream(line)}">{"".join(tips)}</g>')
    return drawn


def _legend(lines: Sequence[Line]) -> list[str]:
    drawn, x = [], 0.0
    for line in lines:
        drawn.append(f'<g class="{_stream(line)}"><path class="line" d="M{x:g} 0h22"/></g>')
        drawn.append(f'<text class="legend" x="{x + 28:g}" y="3.6">{xml(line.name)}</text>')
        x += 28 + sans_width(line.name, 10.5) + 20
    return drawn


def _path(name: str, places: Sequence[Point]) -> str:
    return (
        f'<g class="{name}"><path class="line"'
        f' d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/></g>'
    )


def _stream(line: Line) -> str:
    return f"stream{line.stream % len(theme.LIGHT_STREAMS)}"


# The learning curve of a run as one SVG: mean reward by step, and accuracy on held-out prompts.


_CURVE_WIDTH, _CURVE_HEIGHT, _CURVE_RIGHT = 760.0, 400.0, 30.0
LARGEST = 1e100
"""Numbers beyond are not drawn."""
REWARD_NAMES = ("reward_mean", "reward")
ACCURACY_NAME = "eval_accuracy"
_MARK_ROWS = 12
"""So many rows there are for marks, one below the other."""
_LABEL_SIZE = 11
CURVE_NAMES = ("step", *REWARD_NAMES, ACCURACY_NAME)
"""What it reads of a line."""


def reward_curve_svg(
    metrics: Sequence[Mapping[str, Any]],
    title: str = "Learning curve",
    marks: Sequence[tuple[int, str]] = (),
) -> str:
    """The curve of the lines of metrics.jsonl; lines that lack a number are passed over.

    Reward: each step thin, its running mean over about a twentieth of the steps bold; accuracy: a
    dot per evaluation. marks: steps after which something changed, and what: a line across each.
    """
    width, height = _CURVE_WIDTH, _CURVE_HEIGHT
    left, right, top, bottom = 64.0, _CURVE_RIGHT, 64.0, 52.0
    reward = _series(metrics, REWARD_NAMES)
    accuracy = _series(metrics, (ACCURACY_NAME,))
    body = [f'<text class="heading" x="{left:g}" y="28">{xml(title)}</text>']
    if not reward and not accuracy:
        body.append(
            f'<text class="axis" x="{left:g}" y="{height / 2:g}">no step was finished</text>'
        )
        return document(width, height, title, body)
    values = [value for _, value in (*reward, *accuracy)]
    ys = ticks(min(0.0, min(values)), max(values), 5)
    xs = ticks(0, max(step for step, _ in (*reward, *accuracy)) or 1, 8, whole=True)
    last = max([step for step, _ in (*reward, *accuracy)] + [1.0])

    def place(point: Point) -> Point:
        x = left + (width - left - right) * point[0] / last
        y = height - bottom - (height - top - bottom) * (point[1] - ys[0]) / (ys[-1] - ys[0])
        return x, y

    body += _axes([tick for tick in xs if tick <= last], ys, place, left, width - right)
    many = len(reward) >= SMOOTHED
    shown, means = (
        [place(at) for at in thin(reward)],
        [place(at) for at in thin(smooth(reward))] if many else [],
    )
    rounds = [place(at) for at in accuracy]
    labels = _Labels([line for line in (shown, means, rounds) if line])
    for number, (step, label) in enumerate(marks):
        x = place((min(step, last), ys[0]))[0]
        body.append(f'<path class="grid changed" d="M{x:.1f} {top:g}V{height - bottom:g}"/>')
        is_end = step > last / 2
        rows = [top + 12 + 14 * ((number + row) % _MARK_ROWS) for row in range(_MARK_ROWS)]
        labels.put(label, x + (-6 if is_end else 6), rows, is_end=is_end, kind="axis mark said")
    middle = f'x="{(left + width - right) / 2:g}" y="{height - 12:g}"'
    body.append(f'<text class="axis middle" {middle}>step (optimiser updates)</text>')
    legend = []
    if reward:
        name = "raw stream0" if many else "stream0"
        legend += [(name, "reward, mean of a step")]
        body.append(_path(name, shown))
        if many:
            legend += [("stream0", "its running mean")]
            body.append(_path("stream0", means))
    if accuracy:
        legend += [("stream3", "accuracy on held-out prompts")]
        body.append(_path("stream3", rounds))
        body += [_dot(*place(point), point) for point in accuracy]
        for point in dict.fromkeys((accuracy[0], accuracy[-1])):
            x, y = place(point)
            rows = [
                y + far
                for far in (-10, 19, -24, 33, -38, 47)
                if top - 4 < y + far < height - bottom
            ]
            labels.put(f"{point[1]:.2f}", x, rows, is_end=point[0] > last * 0.9)
    body += labels.drawn
    x = left
    for name, words in legend:
        body.append(f'<g class="{name}"><path class="line" d="M{x:g} 46h24"/></g>')
        body.append(f'<text class="axis" x="{x + 31:g}" y="49.6">{words}</text>')
        x += 31 + len(words) * 5.6 + 26
    return document(width, height, title, body)


class _Labels:
    """Puts words where no line runs, and no other words stand."""

    def __init__(self, lines: Sequence[Sequence[Point]]) -> None:
        self._segments = [pair for line in lines for pair in pairwise(line)]
        self.drawn: list[str] = []
        self._boxes: list[tuple[float, float, float, float]] = []

    def put(
        self, words: str, x: float, rows: Sequence[float], *, is_end: bool, kind: str = "mark"
    ) -> None:
        """Beginning or ending at x, in the first row that is free; in the first where none is."""
        wide = sans_width(words, _LABEL_SIZE)
        left = x - wide if is_end else x
        boxes = [(left - 2, left + wide + 2, row - _LABEL_SIZE, row + 4) for row in rows]
        free = [number for number, box in enumerate(boxes) if not self._is_taken(box)]
        chosen = free[0] if free else 0
        self._boxes.append(boxes[chosen])
        at = f'x="{x:.1f}" y="{rows[chosen]:.1f}"'
        self.drawn.append(
            f'<text class="{kind}{" end" if is_end else ""}" {at}>{xml(words)}</text>'
        )

    def _is_taken(self, box: tuple[float, float, float, float]) -> bool:
        left, right, top, bottom = box
        if any(left < b and a < right and top < d and c < bottom for a, b, c, d in self._boxes):
            return True
        for (x0, y0), (x1, y1) in self._segments:
            begin, end = max(left, min(x0, x1)), min(right, max(x0, x1))
            if begin <= end:
                ys = (
                    [y0 + (y1 - y0) * (at - x0) / (x1 - x0) for at in (begin, end)]
                    if x1 != x0
                    else [y0, y1]
                )
                if min(ys) < bottom and max(ys) > top:
                    return True
        return False


def _series(
    metrics: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> list[tuple[float, float]]:
    values: dict[float, float] = {}
    for line in metrics:
        step, value = line.get("step"), next((line[name] for name in names if name in line), None)
        if _is_number(step) and _is_number(value):
            values[float(step)] = float(value)  # type: ignore[arg-type]
    return sorted(values.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST  # false for NaN


def _dot(x: float, y: float, point: tuple[float, float]) -> str:
    return (
        f'<g class="stream3"><circle class="tip" cx="{x:.1f}" cy="{y:.1f}" r="3.6">'
        f"<title>step {point[0]:g}: {point[1]:.3f}</title></circle></g>"
    )


# Who is at work when, as one SVG: a row for each operator, or for each replica of it, over some
# steps.


MOST_ROWS = 24
_BELOW = 52.0
_LEAST = 0.6
"""Pixels below which a pause is not drawn."""

Span = tuple[float, float]


def timeline_svg(spans: Mapping[str, Sequence[Span]], marks: Sequence[float], title: str) -> str:
    """spans: by row, when it was at work, ascending; marks: the ends of steps. All in seconds; what
    is drawn lies between the first and the last mark. Rows beyond 24 are left out, and said to
    be.
    """
    width, left, right, top, row_height = 900.0, 150.0, 96.0, 64.0, 26.0
    begin, end = marks[0], marks[-1]
    rows = [
        (name, [span for span in row_spans if span[1] > begin and span[0] < end])
        for name, row_spans in spans.items()
    ]
    shown, height = rows[:MOST_ROWS], top + min(len(rows), MOST_ROWS) * row_height + _BELOW

    def place(seconds: float) -> float:
        return left + (width - left - right) * (min(end, max(begin, seconds)) - begin) / (
            end - begin
        )

    body = [
        f'<text class="heading" x="20" y="28">{xml(title)}</text>',
        (
            '<text class="axis" x="20" y="48">bars: at work; lines: a step has ended; right: share'
            " of the time</text>"
        ),
    ]
    bottom = top + len(shown) * row_height
    for mark in marks:
        body.append(f'<path class="grid" d="M{place(mark):.1f} {top - 6:g}V{bottom:.1f}"/>')
    streams: dict[str, int] = {}
    for number, (name, row_spans) in enumerate(shown):
        y = top + number * row_height
        stream = streams.setdefault(name.partition(" ")[0], len(streams)) % len(theme.LIGHT_STREAMS)
        busy = sum(min(end, b) - max(begin, a) for a, b in row_spans) / (end - begin)
        middle = y + row_height / 2
        path = "".join(f"M{a:.1f} {middle:.1f}H{b:.1f}" for a, b in _joined(row_spans, place))
        body.append(
            f'<text class="axis end" x="{left - 10:g}" y="{middle + 4:.1f}">{xml(name)}</text>'
        )
        if path:
            body.append(f'<g class="bar stream{stream}"><path class="line" d="{path}"/></g>')
        body.append(
            f'<text class="axis" x="{width - right + 10:g}" y="{middle + 4:.1f}">{busy:.0%}</text>'
        )
    for at in range(5):
        seconds = begin + (end - begin) * at / 4
        body.append(
            f'<text class="axis middle" x="{place(seconds):.1f}"'
            f' y="{bottom + 18:.1f}">{seconds:.4g}</text>'
        )
    omitted = f"; {len(rows) - len(shown)} more rows are left out" if len(rows) > len(shown) else ""
    body.append(
        f'<text class="axis middle" x="{(left + width - right) / 2:g}"'
        f' y="{bottom + 38:.1f}">seconds{omitted}</text>'
    )
    return document(width, height, title, body)


def _joined(spans: Sequence[Span], place: Callable[[float], float]) -> list[Span]:
    """In pixels; pauses that nobody could see are left out."""
    bars: list[Span] = []
    for a, b in spans:
        left, right = place(a), max(place(b), place(a) + _LEAST)
        if bars and left - bars[-1][1] < _LEAST:
            bars[-1] = (bars[-1][0], max(right, bars[-1][1]))
        else:
            bars.append((left, right))
    return bars
