"""Whole conversations as single training sequences, made of the rows of their calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.errors import RecordError
from dataflow.records import ERROR, LOGPROBS, MASK, ROLLOUT_ID, TOKENS, VERSIONS, schema
from operators.serving.rows import COLUMNS, PARENT_ROLLOUT_ID, REUSED_TOKENS


def conversations(rows: pa.Table) -> pa.Table:
    """One row for each call that no other goes on from, with what the model wrote in the calls before it.

    Its tokens are the call's own, which begin with those of its parent; mask, logprobs and versions of that beginning
    are the parent's, and so on back. Where several calls go on from one, the first has what was written before them,
    so that every token is chosen once. A call that failed is passed over, as are the tokens of parents that `rows`
    lacks. Columns as in `rows.COLUMNS`.

    Raises:
        RecordError: tokens that should be the parent's are not.
    """
    known = {row[ROLLOUT_ID]: row for row in rows.to_pylist() if row[ERROR] is None}
    continued = {row[PARENT_ROLLOUT_ID] for row in known.values()}
    taken: set[int] = set()
    merged = [_merged(row, known, taken) for number, row in known.items() if number not in continued]
    return pa.Table.from_pylist(merged, schema(COLUMNS))


def _merged(leaf: dict[str, Any], known: dict[int, dict[str, Any]], taken: set[int]) -> dict[str, Any]:
    mask, logprobs, versions = (np.array(leaf[name]) for name in (MASK, LOGPROBS, VERSIONS))
    row, shared = leaf, len(leaf[TOKENS])
    while row[ROLLOUT_ID] not in taken:
        taken.add(row[ROLLOUT_ID])
        parent = known.get(row[PARENT_ROLLOUT_ID])
        if parent is None:
            break
        shared = min(shared, row[REUSED_TOKENS])
        if parent[TOKENS][:shared] != leaf[TOKENS][:shared]:
            raise RecordError(
                f"rollout {leaf[ROLLOUT_ID]} should begin with {shared} tokens of rollout {parent[ROLLOUT_ID]}; "
                f"found others; give the rows of one file"
            )
        if parent[ROLLOUT_ID] not in taken:
            chosen = np.flatnonzero(parent[MASK][:shared])
            mask[chosen] = True
            logprobs[chosen] = np.array(parent[LOGPROBS])[chosen]
            versions[chosen] = np.array(parent[VERSIONS])[chosen]
        row = parent
    return {**leaf, MASK: mask.tolist(), LOGPROBS: logprobs.tolist(), VERSIONS: versions.tolist()}
