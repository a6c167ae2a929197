"""Which rectangles show a group of devices: as few as possible, none with a box of another group
inside.
"""

from collections.abc import Mapping, Sequence

from dataflow.draw.geometry import Rect

LARGE = 150
"""Frames of more boxes than this are drawn box by box."""


def pieces(members: Sequence[Rect], others: Sequence[Rect], reach: float) -> list[Rect]:
    """Rectangles that cover the members, merged where they are within `reach` and hold none of the
    others.
    """
    rects = list(members)
    merged = len(rects) <= LARGE
    while merged:
        merged = False
        rects.sort(key=lambda rect: (rect.left, rect.top))
        for first in range(len(rects)):
            for second in range(first + 1, len(rects)):
                union = rects[first].union(rects[second])
                if _is_near(rects[first], rects[second], reach) and not any(
                    union.touches(o) for o in others
                ):
                    rects[first] = union
                    del rects[second]
                    merged = True
                    break
            if merged:
                break
    return rects


def members_of(boxes: Mapping[str, Rect], nodes: Sequence[str]) -> tuple[list[Rect], list[Rect]]:
    """The boxes of a frame, and those of all others."""
    inside = set(nodes)
    return [boxes[name] for name in nodes], [
        rect for name, rect in boxes.items() if name not in inside
    ]


def _is_near(one: Rect, other: Rect, reach: float) -> bool:
    return one.grown(reach, reach, reach).touches(other)
