"""The learning curve of a run as one SVG: mean reward by step, and accuracy on held-out prompts."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dataflow.draw.axes import Point, figure, smooth, thin, ticks
from dataflow.draw.document import document
from dataflow.draw.labels import sans_width, xml

WIDTH, HEIGHT = 760.0, 400.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 30.0, 64.0, 52.0
LARGEST = 1e100
"""Numbers beyond are not drawn."""
SMOOTHED = 20
"""From so many steps on, a running mean is drawn."""
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
    reward = _series(metrics, REWARD_NAMES)
    accuracy = _series(metrics, (ACCURACY_NAME,))
    body = [f'<text class="heading" x="{LEFT:g}" y="28">{xml(title)}</text>']
    if not reward and not accuracy:
        body.append(
            f'<text class="axis" x="{LEFT:g}" y="{HEIGHT / 2:g}">no step was finished</text>'
        )
        return document(WIDTH, HEIGHT, title, body)
    values = [value for _, value in (*reward, *accuracy)]
    ys = ticks(min(0.0, min(values)), max(values), 5)
    xs = ticks(0, max(step for step, _ in (*reward, *accuracy)) or 1, 8, whole=True)
    last = max([step for step, _ in (*reward, *accuracy)] + [1.0])

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - ys[0]) / (ys[-1] - ys[0])
        return x, y

    for tick in ys:
        y = place(0, tick)[1]
        body.append(f'<path class="grid" d="M{LEFT:g} {y:.1f}H{WIDTH - RIGHT:g}"/>')
        body.append(
            f'<text class="axis end" x="{LEFT - 9:g}" y="{y + 3.6:.1f}">{figure(tick)}</text>'
        )
    for tick in xs:
        if tick <= last:
            x = place(tick, 0)[0]
            body.append(
                f'<text class="axis middle" x="{x:.1f}"'
                f' y="{HEIGHT - BOTTOM + 18:g}">{figure(tick)}</text>'
            )
    many = len(reward) >= SMOOTHED
    shown, means = (
        [place(*at) for at in thin(reward)],
        [place(*at) for at in thin(smooth(reward))] if many else [],
    )
    rounds = [place(*at) for at in accuracy]
    labels = _Labels([line for line in (shown, means, rounds) if line])
    for number, (step, label) in enumerate(marks):
        x = place(min(step, last), 0)[0]
        body.append(f'<path class="grid changed" d="M{x:.1f} {TOP:g}V{HEIGHT - BOTTOM:g}"/>')
        is_end = step > last / 2
        rows = [TOP + 12 + 14 * ((number + row) % _MARK_ROWS) for row in range(_MARK_ROWS)]
        labels.put(label, x + (-6 if is_end else 6), rows, is_end=is_end, kind="axis mark said")
    middle = f'x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{HEIGHT - 12:g}"'
    body.append(f'<text class="axis middle" {middle}>step (optimiser updates)</text>')
    legend = []
    if reward:
        name = "raw stream0" if many else "stream0"
        legend += [(name, "reward, mean of a step")]
        body.append(_line(name, shown))
        if many:
            legend += [("stream0", "its running mean")]
            body.append(_line("stream0", means))
    if accuracy:
        legend += [("stream3", "accuracy on held-out prompts")]
        body.append(_line("stream3", rounds))
        body += [_dot(*place(*point), point) for point in accuracy]
        for point in dict.fromkeys((accuracy[0], accuracy[-1])):
            x, y = place(*point)
            rows = [
                y + far
                for far in (-10, 19, -24, 33, -38, 47)
                if TOP - 4 < y + far < HEIGHT - BOTTOM
            ]
            labels.put(f"{point[1]:.2f}", x, rows, is_end=point[0] > last * 0.9)
    body += labels.drawn
    x = LEFT
    for name, words in legend:
        body.append(f'<g class="{name}"><path class="line" d="M{x:g} 46h24"/></g>')
        body.append(f'<text class="axis" x="{x + 31:g}" y="49.6">{words}</text>')
        x += 31 + len(words) * 5.6 + 26
    return document(WIDTH, HEIGHT, title, body)


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


def _line(name: str, points: Sequence[tuple[float, float]]) -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<g class="{name}"><path class="line" d="M{path}"/></g>'


def _dot(x: float, y: float, point: tuple[float, float]) -> str:
    return (
        f'<g class="stream3"><circle class="tip" cx="{x:.1f}" cy="{y:.1f}" r="3.6">'
        f"<title>step {point[0]:g}: {point[1]:.3f}</title></circle></g>"
    )
