"""The learning curve of a run as one SVG: mean reward by step, and accuracy on held-out prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.draw.axes import figure, smooth, thin, ticks
from dataflow.draw.document import document
from dataflow.draw.labels import xml

WIDTH, HEIGHT = 760.0, 400.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 30.0, 64.0, 52.0
LARGEST = 1e100
"""Numbers beyond are not drawn."""
SMOOTHED = 20
"""From so many steps on, a running mean is drawn."""
REWARD_NAMES = ("reward_mean", "reward")
ACCURACY_NAME = "eval_accuracy"
_MARK_ROWS = 4
"""So many marks stand below each other before the next begins above again."""
CURVE_NAMES = ("step", *REWARD_NAMES, ACCURACY_NAME)
"""What it reads of a line."""


def reward_curve_svg(
    metrics: Sequence[Mapping[str, Any]], title: str = "Learning curve", marks: Sequence[tuple[int, str]] = ()
) -> str:
    """The curve of the lines of metrics.jsonl; lines that lack a number are passed over.

    Reward: each step thin, its running mean over about a twentieth of the steps bold; accuracy: a dot per
    evaluation. marks: steps after which something changed, and what: a line across each.
    """
    reward = _series(metrics, REWARD_NAMES)
    accuracy = _series(metrics, (ACCURACY_NAME,))
    body = [f'<text class="heading" x="{LEFT:g}" y="28">{xml(title)}</text>']
    if not reward and not accuracy:
        body.append(f'<text class="axis" x="{LEFT:g}" y="{HEIGHT / 2:g}">no step was finished</text>')
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
        body.append(f'<text class="axis end" x="{LEFT - 9:g}" y="{y + 3.6:.1f}">{figure(tick)}</text>')
    for tick in xs:
        if tick <= last:
            x = place(tick, 0)[0]
            body.append(f'<text class="axis middle" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18:g}">{figure(tick)}</text>')
    for number, (step, what) in enumerate(marks):
        x = place(min(step, last), 0)[0]
        body.append(f'<path class="grid changed" d="M{x:.1f} {TOP:g}V{HEIGHT - BOTTOM:g}"/>')
        end = " end" if step > last / 2 else ""
        at = f'x="{x + (-6 if end else 6):.1f}" y="{TOP + 12 + 14 * (number % _MARK_ROWS):g}"'
        body.append(f'<text class="axis{end}" {at}>{xml(what)}</text>')
    middle = f'x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{HEIGHT - 12:g}"'
    body.append(f'<text class="axis middle" {middle}>step (optimiser updates)</text>')
    legend = []
    if reward:
        many = len(reward) >= SMOOTHED
        name = "raw stream0" if many else "stream0"
        legend += [(name, "reward, mean of a step")]
        body.append(_line(name, [place(*point) for point in thin(reward)]))
        if many:
            legend += [("stream0", "its running mean")]
            body.append(_line("stream0", [place(*point) for point in thin(smooth(reward))]))
    if accuracy:
        legend += [("stream3", "accuracy on held-out prompts")]
        body.append(_line("stream3", [place(*point) for point in accuracy]))
        body += [_dot(*place(*point), point) for point in accuracy]
        for point in dict.fromkeys((accuracy[0], accuracy[-1])):
            x, y = place(*point)
            side = 'mark end" x="' if point[0] > last * 0.9 else 'mark" x="'
            body.append(f'<text class="{side}{x:.1f}" y="{y - 10:.1f}">{point[1]:.2f}</text>')
    x = LEFT
    for name, words in legend:
        body.append(f'<g class="{name}"><path class="line" d="M{x:g} 46h24"/></g>')
        body.append(f'<text class="axis" x="{x + 31:g}" y="49.6">{words}</text>')
        x += 31 + len(words) * 5.6 + 26
    return document(WIDTH, HEIGHT, title, body)


def _series(metrics: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[tuple[float, float]]:
    found: dict[float, float] = {}
    for line in metrics:
        step, value = line.get("step"), next((line[name] for name in names if name in line), None)
        if _is_number(step) and _is_number(value):
            found[float(step)] = float(value)  # type: ignore[arg-type]
    return sorted(found.items())


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
