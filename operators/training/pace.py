"""How long each stage of a trainer's step took, and what arrived meanwhile."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class StepPace:
    """Seconds of each stage of the step under way, and what arrived meanwhile."""

    began: float
    """When the weights of the step before it had been offered."""
    free: float
    """When the trainer began to wait for rows."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage: wait, forward_backward, optimizer, publish, record, checkpoint."""
    arrived_tokens: int = 0
    """Completion tokens of the rows that came in."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """How the node's time had been spent when it began, as `Context.spent` has it."""

    def by_state(self, spent: Mapping[str, float], following: "StepPace") -> dict[str, float]:
        """Seconds of the step by state of the node: seconds_busy, seconds_waiting and so on. spent:
        until now, where the step that follows begins.
        """
        following.spent = spent
        return {
            f"seconds_{name}": value - self.spent.get(name, 0.0) for name, value in spent.items()
        }

    def add(self, stage: str, seconds: float) -> None:
        """Account for a slice of work."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
