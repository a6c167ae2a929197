"""What the trainer computed of the tokens of a step anyway, its own log-probabilities, as a column
beside its rollouts.

Axis suffixes as in `operators.training.learner.packing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.records import MASK, NEW_LOGPROBS, ROLLOUT_ID, TOKENS
from dataflow.tokens.ragged import flat, list_lengths
from operators.training.learner.learner import Learner
from operators.training.learner.packing import Array


@dataclass(frozen=True)
class NewLogprobs:
    """Of each rollout that went through the model, the log-probabilities of its trained tokens."""

    rollouts: Mapping[int, Array] = field(default_factory=dict)
    """By rollout_id, float32 [tokens]; NaN where a token was not trained."""

    @classmethod
    def of(cls, learner: Learner) -> NewLogprobs | None:
        """Those of the step that was computed last, of all ranks; None where the learner keeps
        none.
        """
        if not learner.keep_new_logprobs:
            return None
        by_rollout: dict[int, Array] = {}
        for plain in reversed(
            learner.everywhere(told, is_brief=True)
        ):  # of ranks that share a model's matrices the first one's count
            values = np.frombuffer(plain["values"], np.float32)
            ids = np.frombuffer(plain["rollouts"], np.int64).tolist()
            by_rollout |= zip(
                ids, np.split(values, np.frombuffer(plain["ends"], np.int64))[:-1], strict=True
            )
        return cls(by_rollout)

    def beside(self, groups: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
        """Rows with the column `new_logprobs`, where they have none: by token of the rollout, 0
        where the mask is false and null where the token was not trained; null for a rollout that
        did not go through the model.
        """
        if not groups or NEW_LOGPROBS in groups[0].schema.names:
            return list(groups)
        logprobs = [
            self.rollouts.get(number)
            for rows in groups
            for number in rows.column(ROLLOUT_ID).to_pylist()
        ]
        lengths = np.concatenate([list_lengths(rows.column(TOKENS)) for rows in groups])
        masks = np.concatenate([flat(rows.column(MASK)) for rows in groups])
        is_null = np.array([array is None for array in logprobs], bool)
        values = np.concatenate(
            [np.zeros(0, np.float32), *(array for array in logprobs if array is not None)]
        )
        is_given = ~masks[np.repeat(~is_null, lengths)]
        numbers = pa.array(
            np.where(is_given, np.float32(0), values), mask=np.isnan(values) & ~is_given
        )
        ends = np.r_[0, np.cumsum(np.where(is_null, 0, lengths))].astype(np.int32)
        column = pa.ListArray.from_arrays(pa.array(ends, mask=np.r_[is_null, False]), numbers)
        schema = groups[0].schema.append(pa.field(NEW_LOGPROBS, column.type))
        firsts = np.cumsum([0, *(rows.num_rows for rows in groups)]).tolist()
        return [
            pa.RecordBatch.from_arrays(
                [*rows.columns, column.slice(first, rows.num_rows)], schema=schema
            )
            for rows, first in zip(groups, firsts, strict=False)
        ]


def told(*, learner: Learner, rank: int, ranks: int) -> dict[str, Any]:
    """What one rank has computed, as plain values."""
    rows, values_S = learner.new_logprobs()
    counts = np.r_[0, np.cumsum(~np.isnan(values_S))]
    is_computed_R = counts[rows.offsets[1:]] > counts[rows.offsets[:-1]]
    lengths_R = np.diff(rows.offsets)
    return {
        "rollouts": rows.rollout_ids_R[is_computed_R].astype(np.int64).tobytes(),
        "ends": np.cumsum(lengths_R[is_computed_R]).astype(np.int64).tobytes(),
        "values": values_S[np.repeat(is_computed_R, lengths_R)].tobytes(),
    }
