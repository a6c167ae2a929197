"""How far a tracker has come for certain, where its library writes later than it takes."""

import copy
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from dataflow.trackers.tail import TrackerPlace


class Settling:
    """Places in the order in which they were reached; one is certain once `settles_s` have gone by
    since.

    >>> now = 0.0
    >>> settling = Settling(2.0, lambda: now)
    >>> settling.reached(TrackerPlace(read=10))
    >>> settling.certain() is None
    True
    >>> now = 2.0
    >>> settling.certain().read
    10
    """

    def __init__(self, settles_s: float, clock: Callable[[], float]) -> None:
        """clock: seconds."""
        self._settles_s, self._clock = settles_s, clock
        self._waiting: deque[tuple[float, TrackerPlace]] = deque()

    def reached(self, place: TrackerPlace) -> None:
        """All up to it was taken in."""
        if self._settles_s == math.inf:
            return
        steps = None if place.steps is None else dict(place.steps)
        self._waiting.append(
            (self._clock(), replace(place, kept=copy.deepcopy(place.kept), steps=steps))
        )

    def certain(self) -> TrackerPlace | None:
        """The last place that has become so since this was asked before; None: there is none."""
        found = None
        while self._waiting and self._clock() - self._waiting[0][0] >= self._settles_s:
            found = self._waiting.popleft()[1]
        return found
