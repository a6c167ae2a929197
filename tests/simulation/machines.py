"""The hosts of a simulated run and what lies between them: cut links, in one direction or both, and slow ones.

The scheduler, and the ledger's service beside it, sit at "", which is no host of workers.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .clock import Clock

SCHEDULER = ""


class Machines:
    """Who reaches whom."""

    def __init__(self, clock: Clock, random: Random) -> None:
        self._clock, self._random = clock, random
        self._cut: dict[tuple[str, str], float] = {}
        """By link, from and to: until when nothing passes."""
        self._slow: dict[str, float] = {}
        """By host: how many times as long its messages take."""
        self.on_cut: list[Callable[[], None]] = []
        """Called when a link was cut: long connections may break."""

    def cut(self, from_: str, to: str, until: float) -> None:
        """Nothing passes from one to the other until then."""
        self._cut[from_, to] = max(until, self._cut.get((from_, to), 0.0))

    def slow(self, host: str, times: float) -> None:
        """Whatever this host says or hears takes so many times as long."""
        self._slow[host] = times

    def opens(self, from_: str, to: str) -> float:
        """When something can pass from one to the other; now, where nothing is cut."""
        return max(self._clock.now, self._cut.get((from_, to), 0.0)) if from_ != to else self._clock.now

    def apart(self, one: str, other: str) -> float:
        """Seconds until both can speak to each other again; 0 where they can."""
        return max(self.opens(one, other), self.opens(other, one)) - self._clock.now

    def times(self, one: str, other: str) -> float:
        """How many times as long a message takes between two."""
        return max(self._slow.get(one, 1.0), self._slow.get(other, 1.0)) if one != other else 1.0
