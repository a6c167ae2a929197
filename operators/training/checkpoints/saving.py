"""When a trainer leaves a checkpoint by itself: as soon as what it would have to make again has taken too long."""

from dataclasses import dataclass

DEAR = 20.0
"""Seconds of steps before each second that a checkpoint takes: they cost a twentieth of the time at most."""


@dataclass
class Debt:
    """What a trainer that dies now has to make again: seconds of its steps, without those that it waited for rows.

    within_s: how long that may take. A checkpoint that takes long is left less often, see `DEAR`.
    """

    within_s: float
    seconds: float = 0.0
    """That the steps since a checkpoint was last begun have taken."""
    cost_s: float = 0.0
    """From the first copy to the marker of the last checkpoint, written or not; 0: none was tried."""

    @property
    def is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return self.seconds > max(self.within_s, DEAR * self.cost_s)
