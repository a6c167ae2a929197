"""What a ledger answers with."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OutcomeCounts:
    """What became of the groups that one sink (a trainer or an evaluation) is to consume."""

    issued: int
    """Groups issued by the sources of the sink."""
    trained: int
    """Groups consumed by a step of the surviving line."""
    evaluated: int
    """Groups read by an evaluation."""
    dropped: Mapping[str, int]
    """Groups given up, by reason."""
    in_flight: Mapping[str, int]
    """Groups without an outcome yet, by state."""

    @property
    def missing(self) -> int:
        """Groups lost (above 0) or counted twice (below 0); 0 is the law of the ledger."""
        accounted = (
            self.trained
            + self.evaluated
            + sum(self.dropped.values())
            + sum(self.in_flight.values())
        )
        return self.issued - accounted

    def __str__(self) -> str:
        done = f"{self.trained:,} trained"
        if self.evaluated:
            done = f"{self.evaluated:,} evaluated" + (f" + {done}" if self.trained else "")
        return (
            f"{self.issued:,} group{'' if self.issued == 1 else 's'} issued"
            f" {'=' if self.missing == 0 else '!='} {done} + {sum(self.dropped.values()):,}"
            f" dropped{_parts(self.dropped)} + {sum(self.in_flight.values()):,} in"
            f" flight{_parts(self.in_flight)}"
        )


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A group that some sink still waits for."""

    group_id: int
    """Issue number within the source."""
    prompt_id: str
    """Which task it is."""
    state: str
    """issued | generating | generated | scored."""


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A step that an abandoned line made, to be made again from its rollouts file."""

    step: int
    """Step of the trainer, 1, 2, ..."""
    source: str
    """Where its groups came from."""
    trained: tuple[int, ...]
    """Groups it consumed, in issue order."""
    dropped: Mapping[int, str]
    """Groups it gave up, with the reason."""


@dataclass(frozen=True, kw_only=True)
class MadeStep(PlannedStep):
    """A committed step of the surviving line."""

    metrics: Mapping[str, Any]
    """As the commit was given them: its line in metrics.jsonl, without the seconds that recording
    took."""


@dataclass(frozen=True, kw_only=True)
class Fate:
    """The outcome of a group for one sink."""

    node: str
    """The sink."""
    outcome: str
    """trained | evaluated | dropped."""
    step: int | None
    """Of the sink; None for a drop outside any step."""
    reason: str | None
    """Of a drop."""

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step}"
        return f"{self.outcome} by {self.node}{at}" + (f" ({self.reason})" if self.reason else "")


def _parts(parts: Mapping[str, int]) -> str:
    return (
        f" ({', '.join(f'{number:,} {name}' for name, number in parts.items())})" if parts else ""
    )


def some(groups: Iterable[Any]) -> str:
    """The first few of a list, for a message."""
    listed = sorted(groups)
    return f"{listed[:5]}{f' and {len(listed) - 5} more' if len(listed) > 5 else ''}"
