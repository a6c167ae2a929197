"""Seconds that pass in a simulation, and work of those that share processors."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count


@dataclass(frozen=True, kw_only=True)
class Processors:
    """What the processes of a host share: each of them keeps one core at work, as long as there are
    enough.
    """

    cores: float = float("inf")
    alone: float = 1.0
    """Speed of one process while all other cores are idle, where it is 1 when all are at work: they
    share caches and memory."""

    def speed(self, busy: int) -> float:
        """Of each, where so many are at work."""
        if busy < self.cores and self.alone > 1:
            return 1 + (self.alone - 1) * (self.cores - max(1, busy)) / (self.cores - 1)
        return min(1.0, self.cores / max(1, busy))


class Event:
    """Something that will happen, unless it is cancelled."""

    __slots__ = ("act", "shared")

    def __init__(self, act: Callable[[], None], shared: int) -> None:
        self.act: Callable[[], None] | None = act
        self.shared = shared


class Clock:
    """Time, and a queue of events: by seconds, and by seconds of work where processors are shared
    out evenly.
    """

    def __init__(self, processors: Processors | None = None) -> None:
        self.now = 0.0
        self._processors = processors or Processors()
        self._work, self._busy = 0.0, 0
        self._own: list[tuple[float, int, Event]] = []
        self._shared: list[tuple[float, int, Event]] = []
        self._order = count()

    def reading(self, shared: int) -> float:
        """Seconds that have passed; shared: of work."""
        return self._work if shared else self.now

    def after(self, seconds: float, act: Callable[[], None], *, shared: int = 0) -> Event:
        """Act after so many seconds; shared: after so many of work, for which so many processors
        are taken from now on, one for each of the processes that work together.
        """
        return self.at(self.reading(shared) + seconds, act, shared=shared)

    def at(self, reading: float, act: Callable[[], None], *, shared: int = 0) -> Event:
        """As `after`, once so many seconds have passed since the beginning."""
        event = Event(act, shared)
        heapq.heappush(self._shared if shared else self._own, (reading, next(self._order), event))
        self._busy += shared
        return event

    def cancel(self, event: Event) -> None:
        """Take an event back."""
        event.act = None
        self._busy -= event.shared

    def next(self) -> bool:
        """Let time pass until the next event, and act; False where there is none."""
        own, shared = self._own, self._shared
        while own and own[0][2].act is None:
            heapq.heappop(own)
        while shared and shared[0][2].act is None:
            heapq.heappop(shared)
        if shared:
            speed = self._processors.speed(self._busy)
            at = self.now + (shared[0][0] - self._work) / speed
            if own and own[0][0] <= at:
                at, _, event = heapq.heappop(own)
                self._work += (at - self.now) * speed
            else:
                self._work, _, event = heapq.heappop(shared)
                self._busy -= event.shared
            self.now = at
        elif own:
            self.now, _, event = heapq.heappop(own)
        else:
            return False
        act, event.act = event.act, None
        assert act is not None, "cancelled events are passed over"
        act()
        return True


MOST_SPANS = 4000


@dataclass
class Usage:
    """Of one replica, or of all ranks that work together."""

    clock: Clock
    busy_s: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)
    """When it was at work, in seconds; the first ones, neighbours joined."""
    _began: float | None = None

    def begins(self) -> None:
        """It is at work from now on."""
        self._began = self.clock.now

    def ends(self) -> None:
        """It is not any more."""
        if self._began is None:
            return
        began, now, self._began = self._began, self.clock.now, None
        self.busy_s += now - began
        if self.spans and began - self.spans[-1][1] < 1e-9:
            self.spans[-1] = (self.spans[-1][0], now)
        elif len(self.spans) < MOST_SPANS:
            self.spans.append((began, now))

    def so_far(self) -> float:
        """Seconds at work, those under way included."""
        return self.busy_s + (0.0 if self._began is None else self.clock.now - self._began)
