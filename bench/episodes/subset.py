"""A system that is too slow for all episodes runs some of them: which, and what all would have
taken.
"""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def evenly(rows: Sequence[T], count: int) -> list[T]:
    """So many of the rows, spread over all.

    >>> evenly(range(8), 3)
    [0, 2, 5]
    """
    return [rows[number * len(rows) // count] for number in range(count)]


def together_s(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans was under way.

    >>> together_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def seconds_of_all(seconds: float, waited_s: float, *, share: float, worlds_share: float) -> float:
    """What all episodes would have taken: waiting for worlds as their time is to that of those that
    ran, and all else as the number of episodes is.

    seconds: of those that ran; waited_s: of these, those in which a world was at work. share: how
    many ran, of all. worlds_share: what their worlds took, of what all worlds take.

    >>> seconds_of_all(30.0, 20.0, share=0.5, worlds_share=0.25)
    100.0
    """
    return (seconds - waited_s) / share + waited_s / worlds_share
