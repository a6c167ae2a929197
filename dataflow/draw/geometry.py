"""What the layout takes and gives: sizes, links, rectangles, paths; lengths in pixels, y
downwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Room that one box needs."""

    width: float
    height: float
    trunk: float = 0.0
    """Length of the straight piece right of the box that carries the labels of its outgoing
    links."""
    label_above: float = 0.0
    """Height of the label over the trunk."""
    label_below: float = 0.0
    """Height of the label under the trunk."""

    @property
    def up(self) -> float:
        """Room above the box's middle line."""
        return max(self.height / 2, self.label_above)

    @property
    def down(self) -> float:
        """Room below the box's middle line."""
        return max(self.height / 2, self.label_below)


@dataclass(frozen=True, kw_only=True)
class ForwardEdge:
    """Something that flows from left to right."""

    tail: str
    head: str
    stream: int = 0
    """Which of the parallel streams; stream 0 is kept straightest."""


@dataclass(frozen=True, kw_only=True)
class BackEdge:
    """Something that is led round the outside."""

    tail: str
    head: str
    label_width: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Spacing:
    """Distances of the layout."""

    gap: float = 30.0
    """Least distance between two layers."""
    row: float = 30.0
    """Least distance between two boxes of a layer."""
    stream: float = 7.0
    """Distance between parallel streams."""
    outer: float = 24.0
    """Distance between the boxes and the nearest back edge."""
    track: float = 22.0
    """Distance between two back edges."""
    margin: float = 24.0


@dataclass(frozen=True, kw_only=True)
class Rect:
    """A rectangle by its corners."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        """Horizontal extent."""
        return self.right - self.left

    @property
    def height(self) -> float:
        """Vertical extent."""
        return self.bottom - self.top

    @property
    def middle(self) -> float:
        """Vertical centre."""
        return (self.top + self.bottom) / 2

    @property
    def centre(self) -> float:
        """Horizontal centre."""
        return (self.left + self.right) / 2

    def touches(self, other: "Rect") -> bool:
        """Whether the two share an inner point."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def union(self, other: "Rect") -> "Rect":
        """The least rectangle that holds both."""
        return Rect(
            left=min(self.left, other.left),
            top=min(self.top, other.top),
            right=max(self.right, other.right),
            bottom=max(self.bottom, other.bottom),
        )

    def grown(self, x: float, top: float, bottom: float) -> "Rect":
        """The rectangle with a border around it."""
        return Rect(
            left=self.left - x,
            top=self.top - top,
            right=self.right + x,
            bottom=self.bottom + bottom,
        )


@dataclass(frozen=True, kw_only=True)
class BackRoute:
    """A back edge as a polyline of right angles, and the middle of its label."""

    points: tuple[Point, ...]
    label: Point


@dataclass(frozen=True, kw_only=True)
class DrawnLayout:
    """Where everything is."""

    boxes: dict[str, Rect]
    links: tuple[tuple[Point, ...], ...]
    """For each link its corners; two of equal y are joined by a line, others by a curve with level
    ends."""
    backs: tuple[BackRoute, ...]
    bounds: Rect
    """Everything but the margin."""


# How high each node stands: level with what it is linked to, and no two of a layer too close.


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
