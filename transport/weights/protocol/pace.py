"""How often a writer and its readers speak, and how long they wait for each other; all in
seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Of all ways to move versions."""

    heartbeat_s: float = 0.5
    """Between two signs of life, in both directions."""
    silent_s: float = 3.0
    """After that long without a message a reader is called silent."""
    gone_s: float = 120.0
    """After that long without a message a member is struck off; it may join again."""
    release_s: float = 5.0
    """A waiting version gives the readers this long to leave a segment before it is abandoned to
    them."""


@dataclass(frozen=True, kw_only=True)
class Deadlines(Timing):
    """Of collective rounds, whose ranks speak in a thread of their own, and where one that is gone
    holds up all.
    """

    gone_s: float = 20.0
    form_s: float = 60.0
    """To plan, and to connect all ranks; also for the trainer's ranks to show up."""
    ready_s: float = 20.0
    """From an offer until every rank is ready."""
    transfer_s: float = 120.0
    """From the start of a transfer until every rank has verified its part."""


class FreezeWatch:
    """Whether the process itself stood still for a while: stopped, or its thread was starved; then
    no peer counts as late.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        """`limit_s`: what is shorter is no freeze."""
        self._limit_s, self._awake = limit_s, now

    def frozen_s(self, now: float) -> float:
        """Seconds since the last call, 0 where they are less than the limit."""
        passed, self._awake = now - self._awake, now
        return passed if passed >= self._limit_s else 0.0
