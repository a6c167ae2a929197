"""Small charts of figures by step, one SVG each or several in one: lines of one run, or of
several.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dataflow.draw import theme
from dataflow.draw.axes import Point, figure, smooth, thin, ticks
from dataflow.draw.document import document
from dataflow.draw.labels import sans_width, xml

WIDTH, HEIGHT = 420.0, 220.0
SMOOTHED = 20
"""From so many points on, a running mean is drawn over them."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 16.0, 36.0, 34.0
_LEGEND = 26.0


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


def charts_svg(charts: Sequence[Chart], title: str, columns: int = 2) -> str:
    """Several in one picture, with the names of the lines above them."""
    rows = -(-len(charts) // columns)
    width, top = WIDTH * min(columns, max(len(charts), 1)), 66.0
    named = {line.stream: line for chart in charts for line in chart.lines}
    body = [f'<text class="heading" x="20" y="28">{xml(title)}</text>']
    body.append(
        '<g transform="translate(20'
        f' 50)">{"".join(_legend([named[stream] for stream in sorted(named)]))}</g>'
    )
    for number, chart in enumerate(charts):
        x, y = number % columns * WIDTH, top + number // columns * HEIGHT
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

    for tick in ys:
        y = place((first, tick))[1]
        body.append(f'<path class="grid" d="M{_LEFT:g} {y:.1f}H{WIDTH - _RIGHT:g}"/>')
        body.append(
            f'<text class="axis end" x="{_LEFT - 7:g}" y="{y + 3.6:.1f}">{figure(tick)}</text>'
        )
    for tick in ticks(first, last, 5, whole=True):
        if first <= tick <= last:
            x = place((tick, ys[0]))[0]
            body.append(
                f'<text class="axis middle" x="{x:.1f}"'
                f' y="{HEIGHT - _BOTTOM + 16:g}">{figure(tick)}</text>'
            )
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
