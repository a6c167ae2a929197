"""Turns that episodes ask a generator for, as groups of one: admitted as the group of their
rollout, and answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.records import (
    COMPLETION,
    ERROR,
    FINISH_REASON,
    GROUP_ID,
    MIN_VERSION,
    MOST_TOKENS,
    OF_GROUP,
    OF_SOURCE,
    SAMPLING_MASK,
    SAMPLING_MASK_TYPE,
    SEED,
    STOP,
    TEMPERATURE,
    TOKENS,
    TURN_ANSWER,
    schema,
)
from dataflow.runtime import Batch
from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.engine.finish_reasons import TOO_LONG
from operators.engine.results import EndedRollout
from operators.generation.groups import REASONS, PromptGroup, error_of, temperature_of, texts_of
from operators.generation.tokenize import unknown_token
from operators.generation.turns import Turn, queue_of


def turns_of(
    batch: Batch, context_tokens: int, vocabulary: int, node: str
) -> Iterator[PromptGroup]:
    """The turns of a batch of requests; one whose conversation fills the context has ended, with
    nothing said, and one with a token beyond the `vocabulary` has failed."""
    records = batch.records
    names = (GROUP_ID, OF_SOURCE, OF_GROUP, MIN_VERSION, SEED, MOST_TOKENS, TEMPERATURE, STOP)
    columns = [records.column(name).to_pylist() for name in names]
    lists = records.column(TOKENS)
    for row, values in enumerate(zip(*columns, strict=True)):
        number, source, group_id, min_version, seed, most, temperature, stop = values
        tokens = np.asarray(lists[row].values.to_numpy(), np.int64)
        turn = Turn(
            number=number,
            queue=queue_of(batch.source, source),
            seed=seed,
            limit=len(tokens) + most,
            temperature=temperature,
            stop=tuple(stop or ()),
        )
        group = PromptGroup(
            source=batch.source,
            group_id=group_id,
            size=1,
            min_version=min_version,
            batch=batch,
            row=row,
            prompt=tokens,
            unstarted=1,
            left=1,
            rows=[None],
            turn=turn,
        )
        if (fault := unknown_token(tokens, vocabulary, node)) is not None:
            group.fail(fault)
        elif len(tokens) >= context_tokens:
            said = EndedRollout(
                tokens=RolloutTokens.given(tokens), start=len(tokens), reason=TOO_LONG, text=""
            )
            group.rows, group.unstarted, group.left = [said], 0, 0
        yield group


def answers(turns: Sequence[PromptGroup], tokenizer: Any, ends: frozenset[int]) -> pa.RecordBatch:
    """What was drawn of some turns, in the columns of `TURN_ANSWER`."""
    rows = [row for group in turns for row in group.rows if row is not None]
    said = [row.tokens[row.start :] for row in rows]
    offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens in said])])
    tokens = RolloutTokens.joined(said)
    made = tokens.columns(offsets, sampling_mask=True) | {
        GROUP_ID: pa.array([group.number for group in turns], pa.int64()),
        COMPLETION: pa.array(texts_of(rows, tokenizer, ends), pa.string()),
        TEMPERATURE: pa.array(
            [temperature_of(group) for group in turns], pa.float64(), from_pandas=True
        ),
        FINISH_REASON: pa.array([REASONS[row.reason] for row in rows], pa.string()),
        ERROR: pa.array([error_of(row) for row in rows], pa.string()),
    }
    if tokens.sampling_mask is None:
        made[SAMPLING_MASK] = pa.nulls(len(rows), SAMPLING_MASK_TYPE)
    return pa.RecordBatch.from_arrays(
        [made[name] for name in TURN_ANSWER], schema=schema(TURN_ANSWER)
    )
