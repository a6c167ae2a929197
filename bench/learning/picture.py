"""The picture of the learning bench: accuracy against rollouts as SVG, a line per algorithm, named
at its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.learning.figures import Point, mean_curve
from dataflow.draw import theme
from dataflow.draw.theme import xml

WIDTH, HEIGHT = 860.0, 480.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 170.0, 48.0, 52.0
APART = 13.0
"""Least distance of two names, in pixels."""
DASHES = ("none", "6 4", "2 3")
"""One after the other, each for as many lines as there are colours."""


def picture(
    lines: Sequence[Mapping[str, Any]],
    title: str = "Calculator steps of GSM8K",
    evaluated: str = "steps",
) -> str:
    """The mean curve of each algorithm over its seeds; failed runs are left out. evaluated: what is
    held out.
    """
    good = [line for line in lines if "failed" not in line]
    names = list(dict.fromkeys(line["system"] for line in good))
    curves = {name: mean_curve([line for line in good if line["system"] == name]) for name in names}
    body = [f'<text class="heading" x="{LEFT:g}" y="28">{xml(title)}</text>']
    if curves:
        body += _drawn(curves, evaluated)
    else:
        body.append(
            f'<text class="axis" x="{LEFT:g}" y="{HEIGHT / 2:g}">no run was finished</text>'
        )
    extra = ".dataflow-graph .end{text-anchor:end}.dataflow-graph .middle{text-anchor:middle}"
    return "\n".join(
        [
            (
                '<svg xmlns="http://www.w3.org/2000/svg" class="dataflow-graph" role="img" '
                f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}" width="{WIDTH:g}" height="{HEIGHT:g}">'
            ),
            f"<title>{xml(title)}</title>",
            f"<style>{theme.style()}{extra}</style>",
            f'<rect class="paper" width="{WIDTH:g}" height="{HEIGHT:g}"/>',
            *body,
            "</svg>\n",
        ]
    )


def _drawn(curves: Mapping[str, Sequence[Point]], evaluated: str) -> list[str]:
    points = [point for curve in curves.values() for point in curve]
    most = max(1, *(rollouts for rollouts, _ in points))
    low = math.floor(20 * min(accuracy for _, accuracy in points)) / 20
    high = max(low + 0.05, math.ceil(20 * max(accuracy for _, accuracy in points)) / 20)

    def place(point: Point) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * point[0] / most
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (point[1] - low) / (high - low)

    body = []
    for tick in range(round(20 * low), round(20 * high) + 1):
        y = place((0, tick / 20))[1]
        body.append(f'<path class="grid" d="M{LEFT:g} {y:.1f}H{WIDTH - RIGHT:g}"/>')
        body.append(
            f'<text class="axis end" x="{LEFT - 9:g}" y="{y + 3.6:.1f}">{tick / 20:.2f}</text>'
        )
    for part in range(5):
        x, _ = place((round(most * part / 4), low))
        words = f"{most * part / 4:,.0f}"
        body.append(
            f'<text class="axis middle" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18:g}">{words}</text>'
        )
    middle = f'x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{HEIGHT - 12:g}"'
    words = f"rollouts generated; y: accuracy on held-out {evaluated}"
    body.append(f'<text class="axis middle" {middle}>{words}</text>')
    heights = apart([place(curve[-1])[1] for curve in curves.values()], APART)
    for index, ((name, curve), y) in enumerate(zip(curves.items(), heights, strict=True)):
        stream, dash = (
            index % len(theme.LIGHT_STREAMS),
            DASHES[index // len(theme.LIGHT_STREAMS) % len(DASHES)],
        )
        path = "L".join("{:.1f} {:.1f}".format(*place(point)) for point in curve)
        x, end = place(curve[-1])
        words = f"{name} {curve[-1][1]:.3f}"
        body.append(
            f'<g class="stream{stream}"><path class="line" stroke-dasharray="{dash}"'
            f' d="M{path}"/><path class="line" stroke-dasharray="{dash}" d="M{x + 4:.1f}'
            f' {end:.1f}L{x + 14:.1f} {y:.1f}h14"/></g><text class="axis" x="{x + 33:.1f}"'
            f' y="{y + 3.6:.1f}">{xml(words)}</text>'
        )
    return body


def apart(wanted: Sequence[float], distance: float) -> list[float]:
    """Places as near to the wanted ones as it takes for neighbours to be so far apart, in their
    order.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    blocks: list[tuple[float, int]] = []
    """(sum of where its members want its first one, how many they are) of neighbours that touch."""
    for index in order:
        total, count = wanted[index], 1
        while blocks and _first(blocks[-1]) + blocks[-1][1] * distance > total / count:
            before, members = blocks.pop()
            total, count = before + total - count * members * distance, members + count
        blocks.append((total, count))
    places = [_first(block) + at * distance for block in blocks for at in range(block[1])]
    placed = [0.0] * len(wanted)
    for index, at in zip(order, places, strict=True):
        placed[index] = at
    return placed


def _first(block: tuple[float, int]) -> float:
    """Where the first of a block stands, so that its members are as near to their wishes as can
    be.
    """
    total, count = block
    return total / count
