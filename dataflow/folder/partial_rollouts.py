"""What unfinished rollouts have drawn, as rows of Arrow: a crash costs a long rollout its last
tokens.

A generator's process appends what rollouts have grown by now and then
(`finished.PartialRolloutFiles`). The rows that one process wrote of a rollout are a line; lines are
never joined with one another, as other weights may have drawn them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.records import (
    COMPLETION,
    FINISH_REASON,
    GROUP_ID,
    LOGPROBS,
    POSITION,
    SAMPLING_MASK,
    SAMPLING_MASK_TYPE,
    TOKENS,
    VERSIONS,
)
from dataflow.tokens.rollout_tokens import RolloutTokens, SamplingMask

MARK, BEGIN, LINE = "mark", "begin", "line"

SCHEMA = pa.schema(
    [
        (GROUP_ID, pa.int64()),
        (POSITION, pa.int32()),
        (MARK, pa.int64()),  # of the prompt's tokens and the seed
        (BEGIN, pa.int32()),  # tokens of the completion before these
        (TOKENS, pa.list_(pa.int32())),
        (LOGPROBS, pa.list_(pa.float32())),
        (VERSIONS, pa.list_(pa.int32())),
        (SAMPLING_MASK, SAMPLING_MASK_TYPE),  # null where none is recorded
        (FINISH_REASON, pa.string()),  # null while the rollout goes on
        (COMPLETION, pa.string()),  # null where it is simply its tokens
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRollout:
    """Some tokens of a completion, as they were drawn."""

    begin: int
    """Tokens of the completion before them."""
    tokens: RolloutTokens
    finish_reason: str | None = None
    """Why the rollout ended with them; None while it goes on."""
    text: str | None = None
    """Of an ended rollout, the completion, where it is not simply its tokens."""

    @property
    def end(self) -> int:
        """Tokens of the completion up to the last of them."""
        return self.begin + len(self.tokens)


@dataclass(frozen=True, slots=True)
class PartialRow:
    """A partial rollout, and the rollout that it belongs to."""

    group: int
    position: int
    mark: int
    """Checksum of what a rollout depends on beside the weights: its prompt's tokens and the seed.
    int64."""
    rollout: PartialRollout


def joined(rows: Iterable[PartialRow]) -> PartialRow | None:
    """What the rows of one line of a rollout come to, in the order in which they were written; None
    without a first.

    One that begins at 0 begins anew; one that does not follow the last is passed over, as what was
    between is lost.
    """
    run: list[PartialRow] = []
    for row in rows:
        if row.rollout.begin == 0:
            run = [row]
        elif run and row.rollout.begin == run[-1].rollout.end and row.mark == run[-1].mark:
            run.append(row)
    if not run:
        return None
    last = run[-1]
    tokens = RolloutTokens.joined([row.rollout.tokens for row in run])
    return replace(last, rollout=replace(last.rollout, begin=0, tokens=tokens))


def arrow_rows(rows: Sequence[PartialRow], schema: pa.Schema) -> pa.RecordBatch:
    """The rows of a file. schema: `SCHEMA`, with the name of their line."""
    rollouts = [row.rollout for row in rows]
    offsets = np.concatenate([[0], np.cumsum([len(rollout.tokens) for rollout in rollouts])])
    tokens = RolloutTokens.joined([rollout.tokens for rollout in rollouts])
    columns = tokens.columns(offsets, sampling_mask=True)
    if tokens.sampling_mask is None:
        columns[SAMPLING_MASK] = pa.nulls(len(rows), SAMPLING_MASK_TYPE)
    columns |= {
        GROUP_ID: pa.array([row.group for row in rows], pa.int64()),
        POSITION: pa.array([row.position for row in rows], pa.int32()),
        MARK: pa.array([row.mark for row in rows], pa.int64()),
        BEGIN: pa.array([rollout.begin for rollout in rollouts], pa.int32()),
        FINISH_REASON: pa.array([rollout.finish_reason for rollout in rollouts], pa.string()),
        COMPLETION: pa.array([rollout.text for rollout in rollouts], pa.string()),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def row_at(batch: pa.RecordBatch, at: int) -> PartialRow:
    """The partial rollout in a row."""

    def of(name: str) -> Any:
        return batch.column(name)[at]

    ids, logprobs, versions = (of(name).values.to_numpy() for name in (TOKENS, LOGPROBS, VERSIONS))
    masks = of(SAMPLING_MASK).values
    rollout = PartialRollout(
        begin=of(BEGIN).as_py(),
        tokens=RolloutTokens.drawn(
            ids, logprobs, versions, None if masks is None else SamplingMask.of_lists(masks)
        ),
        finish_reason=of(FINISH_REASON).as_py(),
        text=of(COMPLETION).as_py(),
    )
    return PartialRow(of(GROUP_ID).as_py(), of(POSITION).as_py(), of(MARK).as_py(), rollout)
