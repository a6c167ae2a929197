"""Whole conversations as single training sequences, made of the rows of their calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dataflow.errors import RecordError
from dataflow.records import ERROR, ROLLOUT_ID, schema
from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.serving.rows import COLUMNS, PARENT_ROLLOUT_ID, REUSED_TOKENS


def conversations(rows: pa.Table) -> pa.Table:
    """One row for each call that no other goes on from, with what the model wrote in the calls
    before it.

    Its tokens are the call's own, which begin with those of its parent; mask, logprobs and versions
    of that beginning are the parent's, and so on back. Where several calls go on from one, the
    first has what was written before them, so that every token is chosen once. A call that failed
    is passed over, as are the tokens of parents that `rows` lacks. Columns as in `rows.COLUMNS`.

    Raises:
        RecordError: tokens that should be the parent's are not.
    """
    good = rows.filter(rows.column(ERROR).is_null()).combine_chunks()
    if not good.num_rows:
        return pa.Table.from_pylist([], schema(COLUMNS))
    tokens, offsets = RolloutTokens.of_rows(good)
    names = (ROLLOUT_ID, PARENT_ROLLOUT_ID, REUSED_TOKENS)
    numbers, parents, reused = (good.column(name).to_pylist() for name in names)
    calls = {
        number: _Call(parents[at], reused[at], tokens[offsets[at] : offsets[at + 1]])
        for at, number in enumerate(numbers)
    }
    continued, used = {call.parent for call in calls.values()}, set[int]()
    ends = [at for at, number in enumerate(numbers) if number not in continued]
    merged = [_merged(numbers[at], calls, used) for at in ends]
    columns = RolloutTokens.joined(merged).columns(
        np.r_[0, np.cumsum([len(tokens) for tokens in merged])]
    )
    leaves = good.take(pa.array(ends, pa.int64()))
    return pa.table(
        {name: columns.get(name, leaves.column(name)) for name in COLUMNS}, schema(COLUMNS)
    )


@dataclass(frozen=True)
class _Call:
    """A call's row: its tokens."""

    parent: int | None
    reused: int
    """Tokens that are its parent's."""
    tokens: RolloutTokens


def _merged(number: int, calls: Mapping[int, _Call], used: set[int]) -> RolloutTokens:
    """The tokens of a call, with what was chosen in those before it."""
    own = call = calls[number]
    mask, logprobs, versions = (
        own.tokens.mask.copy(),
        own.tokens.logprobs.copy(),
        own.tokens.versions.copy(),
    )
    at, shared = number, len(own.tokens)
    while at not in used:
        used.add(at)
        if call.parent is None or call.parent not in calls:
            break
        shared = min(shared, call.reused)
        at, call = call.parent, calls[call.parent]
        before = call.tokens[:shared]
        if not np.array_equal(before.ids, own.tokens.ids[:shared]):
            raise RecordError(
                f"rollout {number} should begin with {shared} tokens of rollout {at}; found others;"
                " give the rows of one file"
            )
        if at not in used:
            chosen = np.flatnonzero(before.mask)
            mask[chosen], logprobs[chosen], versions[chosen] = (
                True,
                before.logprobs[chosen],
                before.versions[chosen],
            )
    return RolloutTokens(own.tokens.ids, mask, logprobs, versions)
