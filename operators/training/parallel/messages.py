"""What the ranks of a trainer say to each other: the rows of a step, parts of them, functions to
call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dataflow.system.messages import Message, Plain, Secret
from dataflow.tokens.ragged import gather
from operators.ranks.messages import codec_of
from operators.training.learner.nonfinite import NotFinite
from operators.training.learner.packing import Array
from operators.training.learner.rows import StepRows

# From rank 0


class Join(Message):
    """Meet the other ranks in this folder."""

    folder: str


class BeginStep(Message):
    """Your share of a step; a micro-batch is as many of the rows as `counts` says, one after the
    other.
    """

    version: int
    rows: StepRows
    scale: Array
    counts: tuple[int, ...]


class Micro(Message):
    """Compute the next micro-batch."""


class EndStep(Message):
    """Update the weights."""

    learning_rate: float


class Open(Secret):
    """Open your end of a weight plane at these sites."""

    line: int
    """Which, by `Learner.offered`."""
    sites: tuple[Mapping[str, Plain], ...]
    """As `OpensWriter.sites`; keys of the run may stand there."""


class Publish(Message):
    """Offer your shards of this version on a weight plane."""

    line: int
    version: int


class CallFunction(Message):
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


class CallResult(Message):
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
