"""Turns ragged rollouts into the least work that gives the same loss: every common prefix is
computed once.

A causal model's state at a token depends on the tokens up to it and on nothing else. So the
rollouts of a micro-batch form a tree: the prompt of a group is one path, and rollouts share a path
until they first differ. Only the nodes of that tree go through the model, without any padding;
attention alone sees rows, and gathers them from the nodes by index.

A rollout that is cut into several training rows has as many rows here: each attends to its own
tokens alone.

Axis suffixes: R rollouts (in `pack` their training rows), S all their tokens end to end, T trained
tokens (mask), N nodes, U nodes that some trained token is predicted from, L positions of a row, B
rows of a bucket, K ids that truncation left, of one token after the other.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

BUCKET_MIN_TOKENS = 64
"""Rows up to this length share one bucket: for short rows a second call costs more than the
padding."""
BUCKET_GROWTH = 1.25
"""The longest row of a bucket is at most this much longer than its shortest."""


@dataclass(frozen=True, kw_only=True)
class TokenTree:
    """A micro-batch as a tree of tokens; all arrays int64."""

    tokens_N: Array
    """Token of each node."""
    positions_N: Array
    """Its position in every rollout that passes through it."""
    buckets: tuple[Array, ...]
    """[B, L] each: rows of nodes that attend to one another, padded at the right with node 0."""
    back_N: Array
    """Where each node stands in the buckets, flattened and laid end to end."""
    heads_U: Array
    """Nodes that trained tokens are predicted from."""
    head_T: Array
    """Index into U for each trained token."""
    targets_T: Array
    """The trained tokens."""
    flat_T: Array
    """Where they stand in S."""
    row_T: Array
    """The row they belong to."""

    @property
    def nodes(self) -> int:
        """Tokens that go through the model."""
        return len(self.tokens_N)


def pack(tokens_S: Array, mask_S: Array, offsets: Array, *, share: bool = True) -> TokenTree:
    """Pack rows for one pass through the model.

    tokens_S: integer [S]. mask_S: bool [S], true where the policy chose the token; a first token is
    never trained, because nothing predicts it. offsets: [R + 1], where each row starts in S.
    share: compute common prefixes once; without it each row is a branch of its own.
    """
    rollouts = len(offsets) - 1
    row_S = np.repeat(np.arange(rollouts), np.diff(offsets))
    at_S = np.arange(len(tokens_S)) - offsets[row_S]
    flat_T = np.flatnonzero(mask_S & (at_S > 0))
    row_T, at_T = row_S[flat_T], at_S[flat_T]
    lengths_R = np.zeros(rollouts, np.int64)
    lengths_R[row_T] = at_T  # the last trained token of each row stays, and is not itself an input
    longest = int(np.max(lengths_R, initial=0))
    used_S = at_S < lengths_R[row_S]
    table_R_L = np.full((rollouts, longest), -1, np.int32)
    table_R_L[row_S[used_S], at_S[used_S]] = tokens_S[used_S]

    order_R = _sorted(table_R_L) if share else np.arange(rollouts)
    sorted_R_L, sorted_lengths_R = table_R_L[order_R], lengths_R[order_R]
    valid_R_L = np.arange(longest) < sorted_lengths_R[:, None]
    shared_R = _common_with_previous(sorted_R_L) if share else np.zeros(rollouts, np.int64)
    new_R_L = valid_R_L & (np.arange(longest) >= shared_R[:, None])
    number_R_L = (np.cumsum(new_R_L.ravel()) - 1).reshape(new_R_L.shape)
    owner_R_L = np.maximum.accumulate(np.where(new_R_L, np.arange(rollouts)[:, None], 0), axis=0)
    node_R_L = np.where(valid_R_L, number_R_L[owner_R_L, np.arange(longest)], 0)

    is_prefix_R = np.zeros(rollouts, bool)
    is_prefix_R[:-1] = shared_R[1:] >= sorted_lengths_R[:-1]
    leaves = np.flatnonzero(
        (~is_prefix_R if share else np.ones(rollouts, bool)) & (sorted_lengths_R > 0)
    )
    buckets, back_N = _buckets(node_R_L[leaves], sorted_lengths_R[leaves], int(new_R_L.sum()))

    place_R = np.empty(rollouts, np.int64)
    place_R[order_R] = np.arange(rollouts)
    heads_U, head_T = np.unique(node_R_L[place_R[row_T], at_T - 1], return_inverse=True)
    return TokenTree(
        tokens_N=sorted_R_L[new_R_L].astype(np.int64),
        positions_N=np.nonzero(new_R_L)[1],
        buckets=buckets,
        back_N=back_N,
        heads_U=heads_U,
        head_T=head_T,
        targets_T=tokens_S[flat_T].astype(np.int64),
        flat_T=flat_T,
        row_T=row_T,
    )


def split(
    tokens_S: Array, offsets: Array, groups_R: Array, limit: int, *, whole: bool = False
) -> list[Array]:
    """Cut the rollouts of a step into micro-batches: index arrays into R, in order.

    Groups stay whole, so that their common prompt is computed once, unless one alone is over the
    limit. groups_R: [R], equal within a group, rows of a group side by side. limit: tokens, each
    group's common prefix counted once; a single rollout longer than that is a micro-batch of its
    own. whole: groups are never cut.
    """
    lengths_R = np.diff(offsets)
    rollouts = len(lengths_R)
    starts = (
        np.flatnonzero(np.r_[True, groups_R[1:] != groups_R[:-1]])
        if rollouts
        else np.zeros(0, np.int64)
    )
    units: list[tuple[int, int, int]] = []
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), rollouts], strict=True):
        size = cost(tokens_S, offsets, first, last)
        if whole or size <= limit:
            units.append((first, last, size))
        else:
            units += _cut(lengths_R, first, last, limit)
    total = sum(size for *_, size in units)
    target = total / max(1, -(-total // limit))
    batches: list[Array] = []
    begin, micro_tokens = 0, 0
    for first, last, size in units:
        if micro_tokens and micro_tokens + size > limit:
            batches.append(np.arange(begin, first))
            begin, micro_tokens = first, 0
        micro_tokens += size
        if micro_tokens >= target:
            batches.append(np.arange(begin, last))
            begin, micro_tokens = last, 0
    if begin < rollouts:
        batches.append(np.arange(begin, rollouts))
    return batches


def _sorted(table_R_L: Array) -> Array:
    """An order in which equal prefixes are neighbours, and a row stands before those it is a prefix
    of.
    """
    if table_R_L.size == 0:
        return np.arange(len(table_R_L))
    keys = np.ascontiguousarray(table_R_L + 1)
    return np.argsort(
        keys.view(np.dtype((np.void, keys.itemsize * keys.shape[1]))).ravel(), kind="stable"
    )


def _common_with_previous(table_R_L: Array) -> Array:
    """How many leading tokens each row has in common with the row before it; 0 for the first."""
    differs = table_R_L[1:] != table_R_L[:-1]
    common = (
        np.where(differs.any(axis=1), differs.argmax(axis=1), table_R_L.shape[1])
        if differs.size
        else differs.sum(1)
    )
    return np.asarray(np.r_[0, common].astype(np.int64)[: len(table_R_L)])


def _buckets(node_B_L: Array, lengths_B: Array, nodes: int) -> tuple[tuple[Array, ...], Array]:
    """Rows cut into buckets of like length, shortest first, and where each node stands in them."""
    order = np.argsort(lengths_B, kind="stable")
    buckets: list[Array] = []
    back_N = np.zeros(nodes, np.int64)
    begin, base = 0, 0
    while begin < len(order):
        most = max(BUCKET_MIN_TOKENS, int(lengths_B[order[begin]] * BUCKET_GROWTH))
        end = begin + int(np.searchsorted(lengths_B[order[begin:]], most, side="right"))
        rows = order[begin:end]
        bucket = np.ascontiguousarray(node_B_L[rows, : int(lengths_B[rows[-1]])])
        valid = np.arange(bucket.shape[1]) < lengths_B[rows][:, None]
        back_N[bucket[valid]] = base + np.flatnonzero(valid.ravel())
        buckets.append(bucket)
        begin, base = end, base + bucket.size
    return tuple(buckets), back_N


def cost(tokens_S: Array, offsets: Array, first: int, last: int) -> int:
    """Tokens of the rollouts [first, last), the prefix that all of them have in common counted
    once.
    """
    lengths = np.diff(offsets[first : last + 1])
    shortest = int(lengths.min())
    rows = tokens_S[offsets[first:last, None] + np.arange(shortest)]
    same = (rows == rows[0]).all(axis=0)
    common = shortest if same.all() else int(same.argmin())
    return int(lengths.sum()) - common * (last - first - 1)


def _cut(lengths_R: Array, first: int, last: int, limit: int) -> list[tuple[int, int, int]]:
    """A group that is over the limit, in pieces of whole rollouts."""
    pieces, begin, total = [], first, 0
    for row in range(first, last):
        if row > begin and total + int(lengths_R[row]) > limit:
            pieces.append((begin, row, total))
            begin, total = row, 0
        total += int(lengths_R[row])
    return [*pieces, (begin, last, total)]
