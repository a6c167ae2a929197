"""How high each node stands: level with what it is linked to, and no two of a layer too close."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dataflow.draw.geometry import Size, Spacing

ROUNDS = 10
ROUNDS_LARGE = 4
LARGE = 4_000


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Layers of items in their final order."""

    rows: Sequence[Sequence[int]]
    sizes: Sequence[Size]
    boxes: int
    """Items below this number are boxes, the others bends of links."""
    before: Sequence[Sequence[int]]
    after: Sequence[Sequence[int]]
    pulls: Sequence[dict[int, float]]
    """How strongly a link holds its two ends level."""


def heights(grid: Levels, spacing: Spacing) -> list[float]:
    """Middle line of every item, by sweeps over the layers that end with one from left to right."""
    y = [0.0] * len(grid.sizes)
    steps = [
        [0.0] + [_distance(grid, *pair, spacing) for pair in pairwise(row)] for row in grid.rows
    ]
    for row, step in zip(grid.rows, steps, strict=True):
        total = 0.0
        for item, distance in zip(row, step, strict=True):
            total += distance
            y[item] = total
        for item in row:
            y[item] -= total / 2
    count = len(grid.rows)
    for _ in range(ROUNDS if len(y) < LARGE else ROUNDS_LARGE):
        for index in range(count - 2, -1, -1):
            _settle(grid, index, steps[index], y, grid.after)
        for index in range(1, count):
            _settle(grid, index, steps[index], y, grid.before)
    return y


def spread(
    targets: Sequence[float], weights: Sequence[float], steps: Sequence[float]
) -> list[float]:
    """Values nearest to the wanted ones (weighted least squares), each `steps[i]` or more below the
    last.

    Source: isotonic regression by pooling adjacent violators.
    """
    offsets: list[float] = []
    total = 0.0
    for step in steps:
        total += step
        offsets.append(total)
    pools: list[tuple[float, float, int]] = []
    for want, weight, offset in zip(targets, weights, offsets, strict=True):
        value, mass, count = want - offset, weight, 1
        while pools and pools[-1][0] >= value:
            pool_value, other_mass, other_count = pools.pop()
            value = (value * mass + pool_value * other_mass) / (mass + other_mass)
            mass, count = mass + other_mass, count + other_count
        pools.append((value, mass, count))
    flat = [value for value, _, count in pools for _ in range(count)]
    return [value + offset for value, offset in zip(flat, offsets, strict=True)]


def _distance(grid: Levels, above: int, below: int, spacing: Spacing) -> float:
    bends = (above >= grid.boxes) + (below >= grid.boxes)
    room = (spacing.row, spacing.row * 0.6, spacing.stream * 1.5)[bends]
    return grid.sizes[above].down + room + grid.sizes[below].up


def _settle(
    grid: Levels, index: int, steps: Sequence[float], y: list[float], near: Sequence[Sequence[int]]
) -> None:
    targets, weights = [], []
    for item in grid.rows[index]:
        pulls = [(y[neighbour], grid.pulls[item][neighbour]) for neighbour in near[item]]
        targets.append(_median(pulls) if pulls else y[item])
        weights.append(sum(pull for _, pull in pulls) or 0.01)
    for item, height in zip(grid.rows[index], spread(targets, weights, steps), strict=True):
        y[item] = height


def _median(pulls: list[tuple[float, float]]) -> float:
    pulls.sort()
    half, total = sum(weight for _, weight in pulls) / 2, 0.0
    for at, (value, weight) in enumerate(pulls):
        total += weight
        if abs(total - half) < 1e-9:
            return (value + pulls[at + 1][0]) / 2
        if total > half:
            return value
    return pulls[-1][0]
