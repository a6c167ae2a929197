"""Columns with a list for each row as flat arrays, and the groups of a batch: where each of them
begins and ends. Of the versions of a rollout's tokens also how old they are.
"""

import itertools

import numpy as np
import pyarrow as pa

from dataflow.errors import RecordError
from dataflow.records import GROUP_ID, ROLLOUT_ID, AnyArray
from dataflow.staleness import NO_TOKEN, newest_versions, oldest_versions


def list_lengths(column: pa.ListArray) -> AnyArray:
    """Length of each list of a ragged column, int64 [rows]."""
    offsets: AnyArray = column.offsets.to_numpy()
    return np.diff(offsets).astype(np.int64)


def one_chunk(rows: pa.Table, name: str) -> pa.Array:
    """A column of a table whose chunks are combined."""
    column = rows.column(name)
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def flat(column: pa.ListArray) -> AnyArray:
    """The numbers of all lists, end to end."""
    return np.asarray(column.flatten().to_numpy(zero_copy_only=False))


def per_token(rows: pa.Table, name: str, offsets: AnyArray) -> AnyArray:
    """A column of numbers per token, flat. RecordError unless its lists are as long as the rows'
    tokens.
    """
    column = one_chunk(rows, name)
    check_lengths(list_lengths(column), name, rows, offsets)
    return flat(column)


def check_lengths(lengths: AnyArray, name: str, rows: pa.Table, offsets: AnyArray) -> None:
    """RecordError unless a column's lists are as long as the tokens."""
    wrong = np.flatnonzero(lengths != np.diff(offsets))
    if len(wrong):
        row = int(wrong[0])
        rollout = rows.column(ROLLOUT_ID)[row].as_py()
        raise RecordError(
            f"column '{name}' of rollout {rollout} has {lengths[row]} numbers but the rollout has"
            f" {np.diff(offsets)[row]} tokens, prompt included; give each token one, 0 where mask"
            " is false"
        )


def gather(offsets: AnyArray, rows: AnyArray) -> tuple[AnyArray, AnyArray]:
    """The flat positions of some rows, and their offsets: x[positions] are those rows end to
    end.
    """
    lengths = np.diff(offsets)[rows]
    ends = np.r_[0, np.cumsum(lengths)]
    return np.arange(ends[-1]) + np.repeat(offsets[:-1][rows] - ends[:-1], lengths), ends


def group_slices(records: pa.RecordBatch) -> list[tuple[int, int, int]]:
    """(group_id, first row, rows) of the groups of a batch, in order; the rows of a group lie side
    by side.
    """
    ids = records.column(GROUP_ID).to_numpy()
    bounds = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]
    return [
        (int(ids[start]), start, end - start)
        for start, end in itertools.pairwise(bounds)
        if end > start
    ]


def whole_groups(records: pa.RecordBatch, most_rows: int, most_bytes: int) -> list[pa.RecordBatch]:
    """Slices of at most so many rows and bytes, cut between groups; a group that is larger by
    itself stays whole.
    """
    if records.num_rows <= most_rows and records.nbytes <= most_bytes:
        return [records]
    parts, start, last = [], 0, 0
    for _, first, count in group_slices(records):
        end = first + count
        if last > start and (
            end - start > most_rows or records.slice(start, end - start).nbytes > most_bytes
        ):
            parts.append(records.slice(start, last - start))
            start = last
        last = end
    return [*parts, records.slice(start)]


# How old rollouts are in the step that trains them: versions made while they were generated, or
# while they waited.


def staleness_at(step: int, versions: pa.ListArray | pa.ChunkedArray) -> pa.Array:
    """Versions that each rollout's oldest token is behind those that a step begins with, int64
    [rows]; null where the policy chose none.

    versions: as `oldest_versions` has them.
    """
    oldest = oldest_versions(versions)
    return pa.array(step - 1 - oldest, pa.int64(), mask=oldest == NO_TOKEN)


def staleness_parts(
    step: int, versions: pa.ListArray | pa.ChunkedArray
) -> tuple[pa.Array, pa.Array]:
    """Of `staleness_at`, the versions that were made while a rollout was generated, from its oldest
    token to its newest, and those while it waited, from there to the step; both int64 [rows], and
    null where the policy chose none.

    versions: as `oldest_versions` has them.
    """
    oldest = oldest_versions(versions)
    newest = newest_versions(versions)
    none = oldest == NO_TOKEN
    return pa.array(newest - oldest, pa.int64(), mask=none), pa.array(
        step - 1 - newest, pa.int64(), mask=none
    )
