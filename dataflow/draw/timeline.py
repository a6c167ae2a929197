"""Who is at work when, as one SVG: a row for each operator, or for each replica of it, over some
steps.
"""

from collections.abc import Callable, Mapping, Sequence

from dataflow.draw import theme
from dataflow.draw.document import document
from dataflow.draw.labels import xml

WIDTH, LEFT, RIGHT, TOP, ROW = 900.0, 150.0, 96.0, 64.0, 26.0
MOST_ROWS = 24
_BELOW = 52.0
_LEAST = 0.6
"""Pixels below which a pause is not drawn."""

Span = tuple[float, float]


def timeline_svg(
    spans: Mapping[str, Sequence[Span]],
    marks: Sequence[float],
    title: str,
    *,
    unit: str = "seconds",
) -> str:
    """spans: by row, when it was at work, ascending; marks: the ends of steps. All in seconds; what
    is drawn lies between the first and the last mark. Rows beyond 24 are left out, and said to
    be.
    """
    begin, end = marks[0], marks[-1]
    rows = [
        (name, [span for span in row_spans if span[1] > begin and span[0] < end])
        for name, row_spans in spans.items()
    ]
    shown, height = rows[:MOST_ROWS], TOP + min(len(rows), MOST_ROWS) * ROW + _BELOW

    def place(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (min(end, max(begin, seconds)) - begin) / (
            end - begin
        )

    body = [
        f'<text class="heading" x="20" y="28">{xml(title)}</text>',
        (
            '<text class="axis" x="20" y="48">bars: at work; lines: a step has ended; right: share'
            " of the time</text>"
        ),
    ]
    bottom = TOP + len(shown) * ROW
    for mark in marks:
        body.append(f'<path class="grid" d="M{place(mark):.1f} {TOP - 6:g}V{bottom:.1f}"/>')
    streams: dict[str, int] = {}
    for number, (name, row_spans) in enumerate(shown):
        y = TOP + number * ROW
        stream = streams.setdefault(name.partition(" ")[0], len(streams)) % len(theme.LIGHT_STREAMS)
        busy = sum(min(end, b) - max(begin, a) for a, b in row_spans) / (end - begin)
        path = "".join(f"M{a:.1f} {y + ROW / 2:.1f}H{b:.1f}" for a, b in _joined(row_spans, place))
        body.append(
            f'<text class="axis end" x="{LEFT - 10:g}" y="{y + ROW / 2 + 4:.1f}">{xml(name)}</text>'
        )
        if path:
            body.append(f'<g class="bar stream{stream}"><path class="line" d="{path}"/></g>')
        body.append(
            f'<text class="axis" x="{WIDTH - RIGHT + 10:g}"'
            f' y="{y + ROW / 2 + 4:.1f}">{busy:.0%}</text>'
        )
    for at in range(5):
        seconds = begin + (end - begin) * at / 4
        body.append(
            f'<text class="axis middle" x="{place(seconds):.1f}"'
            f' y="{bottom + 18:.1f}">{seconds:.4g}</text>'
        )
    omitted = f"; {len(rows) - len(shown)} more rows are left out" if len(rows) > len(shown) else ""
    body.append(
        f'<text class="axis middle" x="{(LEFT + WIDTH - RIGHT) / 2:g}"'
        f' y="{bottom + 38:.1f}">{xml(unit + omitted)}</text>'
    )
    return document(WIDTH, height, title, body)


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
