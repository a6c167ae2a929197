"""Clocks that stand still while a run is stopped (Ctrl-Z), so that nobody loses patience with
anybody meanwhile.
"""

import threading
import time
from collections.abc import Callable

ABSENT_S = 1.0
"""From one look to the next: a process that took longer was stopped, or had no core, and could not
have heard."""


class RunClock:
    """Seconds of the machine's clock, without those that its owner took out."""

    def __init__(self, away_s: float = 0.0) -> None:
        """away_s: taken out so far."""
        self.away_s = away_s

    def __call__(self) -> float:
        """Now."""
        return time.monotonic() - self.away_s

    def stand_still(self, stop: Callable[[], object]) -> None:
        """Take out what `stop` takes."""
        began = time.monotonic()
        stop()
        self.away_s += time.monotonic() - began


class AwakeClock:
    """Seconds of the machine's clock in which this process could run.

    Nobody is told that he was stopped (SIGSTOP): it shows when a clock that some thread looks at
    several times a second has gone on by more than `ABSENT_S` between two looks. That time is taken
    out, whoever looks first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: the machine's."""
        self._clock, self._lock = clock, threading.Lock()
        self._looked, self._away_s = clock(), 0.0

    def __call__(self) -> float:
        """Now."""
        with self._lock:
            now = self._clock()
            if now - self._looked > ABSENT_S:
                self._away_s += now - self._looked
            self._looked = now
            return now - self._away_s


LOOK_S = 0.2
"""How long one slice of a wait may be, so that its countdown sees a stop."""


class Countdown:
    """What is left of a wait, without the seconds in which this process was stopped.

    Its owner waits in slices: `while not came(wait.slice_s): if wait.is_over: ...`.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] | None = None) -> None:
        """clock: an `AwakeClock`; one of its own when None."""
        self._clock = clock or AwakeClock()
        self._ends = self._clock() + seconds

    @property
    def slice_s(self) -> float:
        """How long to wait before the next look."""
        return min(LOOK_S, max(0.0, self._ends - self._clock()))

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self._clock() >= self._ends


class Seldom:
    """Does something as often as it is asked to, but for what takes long: that has a small share of
    the time.
    """

    def __init__(self, share: float = 0.05) -> None:
        self._share, self._next = share, 0.0

    def __call__(self, action: Callable[[], None]) -> None:
        """Do it, unless it was done a moment ago."""
        began = time.monotonic()
        if began < self._next:
            return
        busy = time.thread_time()
        action()
        self._next = began + (time.thread_time() - busy) / self._share
