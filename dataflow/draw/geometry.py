"""What the layout takes and gives: sizes, links, rectangles, paths; lengths in pixels, y
downwards.
"""

from dataclasses import dataclass, field
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
    trunks: dict[str, Point] = field(default_factory=dict)
    """For each box with links going out: right end of its trunk, y of the middle of the box."""
    bounds: Rect
    """Everything but the margin."""
