"""What is asked of a model about some rows, and what a way of asking is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa

from dataflow.records import AnyArray
from dataflow.tokens.sampling_mask import SamplingMask
from operators.training.learner.learner import Forward


@dataclass(frozen=True, kw_only=True)
class ModelQuery:
    """Sequences and where a number is wanted; axis suffixes as in
    `operators.training.learner.rows`, R sequences.
    """

    tokens_S: AnyArray
    read_S: AnyArray
    """Whether a number is wanted for a token; it is read at the one before it; bool."""
    offsets: AnyArray
    """[R + 1] into S."""
    groups_R: AnyArray
    """group_id of each."""
    row_R: AnyArray
    """Which of the rows it was made of, in their order; several are of one row where it has several
    training rows."""
    left_S: SamplingMask | None = None
    """The ids that truncation left at each token."""
    places_R: tuple[AnyArray, ...] = ()
    """Tokens of the rollout that each sequence's numbers belong to, where those are not the tokens
    that were read."""
    failures: dict[int, str] = field(default_factory=dict)
    """By row, why nothing could be asked about it."""

    @property
    def firsts(self) -> AnyArray:
        """The first sequence of each row that has any."""
        return np.flatnonzero(np.diff(self.row_R, prepend=-1))


class Reading(Protocol):
    """How an operator asks its model about rows, and what it makes of the answers."""

    forward: Forward

    def ask(self, rows: pa.RecordBatch) -> ModelQuery:
        """What to compute for rows that have not failed. Raises OperatorError when the model cannot
        read them.
        """

    def column(self, rows: pa.RecordBatch, query: ModelQuery, numbers_S: AnyArray) -> pa.Array:
        """The answers, one for each row that was asked about; numbers_S: float32, 0 where none was
        wanted.
        """


def lists(numbers_S: AnyArray, offsets: AnyArray) -> pa.ListArray:
    """A list of float32 for each range of offsets."""
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), pa.array(numbers_S.astype(np.float32), pa.float32())
    )
