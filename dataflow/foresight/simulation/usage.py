"""When an operator is at work in a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataflow.foresight.simulation.clock import Clock

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
