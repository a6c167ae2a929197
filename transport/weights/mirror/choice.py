"""Which mirror a reader follows, and when it becomes one: pure.

No lock says who it is. Two mirrors of one host at a time are both right, and each takes a version
over its host's link; the note beside the sockets is the last one's, whom the other follows from
then on. So whoever is stopped, killed or slow, at any moment, holds nobody up for longer than
`SILENT_S`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SILENT_S = 3.0
"""For that long a reader hears nothing of the mirror that it follows until it takes versions
itself."""
APART_S = 0.5
"""Between the times at which two neighbours would do so: the second follows the first."""
MOST_ORDER = 8
"""From there on all wait alike."""


@dataclass(frozen=True, kw_only=True)
class MirrorView:
    """What a reader knows when it looks."""

    own: str
    """Its address, if it is a mirror."""
    follows: str
    """The mirror that it listens to; empty: none yet."""
    noted: str
    """The one that the note names; empty: there is none."""
    leads: bool
    """Whether it is a mirror."""
    quiet_s: float
    """Since it heard of the one that it follows, or turned to it; or of none, since it began to
    look."""
    order: int
    """Among the readers of its host, by the plan."""


def choose(seen: MirrorView) -> Literal["stay", "lead", "follow"]:
    """Stay with what it does, become the mirror, or follow the one that the note names."""
    if seen.leads:
        return "stay" if seen.noted in ("", seen.own) else "follow"
    if seen.noted == seen.own:
        return "lead"
    if seen.noted and seen.noted != seen.follows:
        return "follow"
    turn_s = APART_S * min(seen.order, MOST_ORDER)
    return "lead" if seen.quiet_s >= turn_s + SILENT_S * bool(seen.noted) else "stay"
