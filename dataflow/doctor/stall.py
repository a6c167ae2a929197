"""When a run that does not move is to be warned of, and when it is to end: pure.

Time counts only while somebody looks: a scheduler that was stopped for an hour has seen nothing of
that hour. A node that is at work (a model that loads, a first compile, a long step) is given
`slice_s` to show something for it.
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

MOST_BETWEEN_S = 5.0
"""A longer pause between two looks counts as so many seconds."""

Decision: TypeAlias = Literal["fine", "slow", "stalled"]


@dataclass(frozen=True, kw_only=True)
class Stillness:
    """How long nothing has moved, as far as was seen."""

    marks: object = None
    """What moves: rows, tokens, steps, versions; of any type that can be compared."""
    looked: float | None = None
    """Time of the last look."""
    still_s: float = 0.0
    """Seconds without a change of marks."""
    idle_s: float = 0.0
    """Seconds without a change of marks, and with nobody at work."""

    def look(self, marks: object, at_work: bool, now: float) -> "Stillness":
        """The stillness after another look. at_work: somebody works, starts, or is started
        again.
        """
        passed = 0.0 if self.looked is None else min(max(0.0, now - self.looked), MOST_BETWEEN_S)
        if marks != self.marks:
            return Stillness(marks=marks, looked=now)
        return replace(
            self,
            looked=now,
            still_s=self.still_s + passed,
            idle_s=0.0 if at_work else self.idle_s + passed,
        )


def decide(stillness: Stillness, *, stall_s: float, slice_s: float) -> Decision:
    """slow: warn; stalled, at twice the limit: end the run."""
    part = max(stillness.idle_s / stall_s, stillness.still_s / slice_s)
    return "stalled" if part >= 2 else "slow" if part >= 1 else "fine"
