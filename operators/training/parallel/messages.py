"""What the ranks of a trainer say to each other: the rows of a step, parts of them, functions to
call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflow.system.messages import Plain
from dataflow.tokens.ragged import gather
from operators.ranks.messages import Numbers, Tokens, codec_of
from operators.training.learner.nonfinite import NotFinite
from operators.training.learner.packing import Array
from operators.training.learner.rows import StepRows

_ARRAYS = ("offsets", "cuts_S", "groups_R", "rollout_ids_R", "oldest_R")

# From rank 0


@dataclass(frozen=True)
class Join:
    """Meet the other ranks in this folder."""

    folder: str


@dataclass(frozen=True)
class RowsMessage:
    """Rows of a step, as `StepRows`."""

    tokens: Tokens
    arrays: Mapping[str, Numbers]
    columns_R: Mapping[str, Numbers]
    columns_S: Mapping[str, Numbers]

    @classmethod
    def of(cls, rows: StepRows) -> RowsMessage:
        """The message of rows."""
        return cls(
            Tokens.of(rows.tokens),
            {name: Numbers.of(getattr(rows, name)) for name in _ARRAYS},
            {name: Numbers.of(values) for name, values in rows.columns_R.items()},
            {name: Numbers.of(values) for name, values in rows.columns_S.items()},
        )

    def rows(self) -> StepRows:
        """The rows again."""
        return StepRows(
            tokens=self.tokens.tokens,
            **{name: values.array for name, values in self.arrays.items()},
            columns_R={name: values.array for name, values in self.columns_R.items()},
            columns_S={name: values.array for name, values in self.columns_S.items()},
        )


@dataclass(frozen=True)
class BeginStep:
    """Your share of a step; a micro-batch is as many of the rows as `counts` says, one after the
    other.
    """

    version: int
    rows: RowsMessage
    scale: Numbers
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Micro:
    """Compute the next micro-batch."""


@dataclass(frozen=True)
class EndStep:
    """Update the weights."""

    learning_rate: float


@dataclass(frozen=True)
class Open:
    """Open your end of a weight plane at these sites."""

    line: int
    """Which, by `Learner.offered`."""
    sites: tuple[Mapping[str, Plain], ...] = field(repr=False)
    """As `OpensWriter.sites`; keys of the run may stand there."""


@dataclass(frozen=True)
class Publish:
    """Offer your shards of this version on a weight plane."""

    line: int
    version: int


@dataclass(frozen=True)
class CallFunction:
    """Call a function; all ranks are forks of one process, and have it."""

    function: str
    """By `name_of`."""
    paths: Mapping[str, str]
    values: Mapping[str, Plain]

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: Mapping[str, Any]) -> CallFunction:
        """The call of a module's function with plain values and paths."""
        paths = {name: str(value) for name, value in arguments.items() if isinstance(value, Path)}
        return cls(
            name_of(function),
            paths,
            {name: value for name, value in arguments.items() if name not in paths},
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments again."""
        return {**self.values, **{name: Path(value) for name, value in self.paths.items()}}


# From the others


@dataclass(frozen=True)
class CallResult:
    """What the function returned."""

    value: Plain


CODEC = codec_of(
    "trainer-ranks",
    Join,
    BeginStep,
    Micro,
    EndStep,
    Open,
    Publish,
    CallFunction,
    NotFinite,
    CallResult,
)


def chosen(rows: StepRows, rollouts: Array) -> StepRows:
    """Some of the rollouts, in that order."""
    positions, offsets = gather(rows.offsets, rollouts)
    return StepRows(
        tokens=rows.tokens.take(positions),
        offsets=offsets,
        cuts_S=rows.cuts_S[positions],
        groups_R=rows.groups_R[rollouts],
        rollout_ids_R=rows.rollout_ids_R[rollouts],
        oldest_R=rows.oldest_R[rollouts],
        columns_R={name: values[rollouts] for name, values in rows.columns_R.items()},
        columns_S={name: values[positions] for name, values in rows.columns_S.items()},
    )


def name_of(function: Callable[..., Any]) -> str:
    """Where other ranks, which are forks of this process, find a module's function."""
    return f"{function.__module__}:{function.__qualname__}"


def function_of(name: str) -> Callable[..., Any]:
    """That function again."""
    module, _, path = name.partition(":")
    target: Any = importlib.import_module(module)
    for attribute in path.split("."):
        target = getattr(target, attribute)
    return target  # type: ignore[no-any-return]
