"""Cuts a token tree into blocks for attention, so that no token attends twice: pure functions.

Rows that are gathered whole make every prefix attend once per row. A block is a run of neighbouring
nodes: these ask, and they and their ancestors are asked. Nodes are numbered in preorder, so what a
node sees of a block's keys are those that come no later, and whose subtree has not ended before it.

Axis suffixes as in `operators.training.learner.packing`; and Q asking and K asked nodes of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dataflow.records import AnyArray as Array

KEY_COST = 8
"""Pairs of tokens that cost as much as one more key to gather."""
LONG_ROW = 512
"""Keys from which on a row that is mostly its own is computed as a causal row: half of the pairs,
and no mask."""
MOST_MASKED = 2048
"""Keys from which on every row is: masks are as large as queries times keys."""
PADDED = 1.5
"""Pairs of a bucket over those that its blocks have, at most, unless they are few."""
FEW_PAIRS = 1 << 14


@dataclass(frozen=True, kw_only=True)
class AttentionBlocks:
    """Blocks of like size; arrays int64."""

    queries_B_Q: Array
    """Nodes that ask; the last one of a block again where it is padding."""
    keys_B_K: Array
    """Nodes that are asked, ancestors first; -1: padding."""
    is_causal: bool
    """Queries and keys are the same rows, padded at the right."""


def subtree_ends(positions_N: Array) -> Array:
    """The first node behind each node's subtree. positions_N: depths, in preorder."""
    ends_N = np.full(len(positions_N), len(positions_N))
    open_nodes: list[int] = []
    starts = _chain_starts(positions_N)
    for first, last in pairwise([*starts, len(positions_N)]):
        depth = int(positions_N[first])
        ends_N[open_nodes[depth:]] = first
        del open_nodes[depth:]
        open_nodes += range(first, last)
    return ends_N


def attention_blocks(positions_N: Array) -> tuple[tuple[AttentionBlocks, ...], Array]:
    """Blocks in which each node asks once, and where each node's answer stands in them, laid end to
    end.
    """
    blocks = list(_merged(positions_N))
    attention: list[AttentionBlocks] = []
    back_N = np.zeros(len(positions_N), np.int64)
    base = 0
    for bucket in _buckets(blocks):
        most_queries = max(len(block.path) if block.is_causal else block.size for block in bucket)
        most_keys = max(block.keys for block in bucket)
        queries_B_Q = np.zeros((len(bucket), most_queries), np.int64)
        keys_B_K = np.full((len(bucket), most_keys), -1)
        for row, block in enumerate(bucket):
            own = np.arange(block.first, block.last)
            keys = np.r_[block.path, own] if not block.is_causal else block.path
            keys_B_K[row, : len(keys)] = keys
            asking = block.path if block.is_causal else own
            queries_B_Q[row, : len(asking)] = asking
            queries_B_Q[row, len(asking) :] = asking[-1]
            begin = len(asking) - len(own)
            back_N[own] = base + row * most_queries + begin + np.arange(len(own))
        attention.append(
            AttentionBlocks(
                queries_B_Q=queries_B_Q, keys_B_K=keys_B_K, is_causal=bucket[0].is_causal
            )
        )
        base += queries_B_Q.size
    return tuple(attention), back_N


def visible(queries_B_Q: Array, keys_B_K: Array, ends_N: Array) -> Array:
    """Whether each key is the query's node or one of its ancestors: bool [B, Q, K]."""
    ends_B_K = np.where(keys_B_K < 0, -1, ends_N[keys_B_K])
    asking = queries_B_Q[:, :, None]
    is_visible: Array = (keys_B_K[:, None] <= asking) & (asking < ends_B_K[:, None])
    return is_visible


@dataclass
class _Block:
    """Nodes [first, last), and the path that leads to the first of them; of a causal row all of its
    nodes.
    """

    first: int
    last: int
    path: Array
    is_causal: bool = False

    @property
    def size(self) -> int:
        return self.last - self.first

    @property
    def keys(self) -> int:
        return len(self.path) + (0 if self.is_causal else self.size)


def _chain_starts(positions_N: Array) -> list[int]:
    """Where the tree branches off: nodes that do not hang on the node before them."""
    if not len(positions_N):
        return []
    return np.flatnonzero(np.r_[True, positions_N[1:] != positions_N[:-1] + 1]).tolist()


def _merged(positions_N: Array) -> Iterator[_Block]:
    """Chains, those together that cost less so."""
    path_L = np.zeros(int(positions_N.max(initial=-1)) + 1, np.int64)
    block: _Block | None = None
    for first, last in pairwise([*_chain_starts(positions_N), len(positions_N)]):
        depth, size = int(positions_N[first]), last - first
        path_L[depth : depth + size] = np.arange(first, last)
        if depth + size > MOST_MASKED or (depth + size > LONG_ROW and size >= depth):
            if block is not None:
                yield block
            block = None
            yield _Block(first, last, path_L[: depth + size].copy(), is_causal=True)
            continue
        if block is not None and size * (block.size + block.keys - depth) <= KEY_COST * depth:
            block.last = last
            continue
        if block is not None:
            yield block
        block = _Block(first, last, path_L[:depth].copy())
    if block is not None:
        yield block


def _buckets(blocks: Iterable[_Block]) -> Iterator[list[_Block]]:
    """Blocks of like size together, as few buckets as waste little."""
    bucket: list[_Block] = []
    queries = keys = pairs = 0
    for block in sorted(blocks, key=lambda block: (block.is_causal, block.keys, block.size)):
        asking = len(block.path) if block.is_causal else block.size
        wide, long = max(queries, asking), max(keys, block.keys)
        own = pairs + asking * block.keys
        padded = (len(bucket) + 1) * wide * long
        if bucket and (
            block.is_causal != bucket[0].is_causal or padded > max(PADDED * own, FEW_PAIRS)
        ):
            yield bucket
            bucket, queries, keys, pairs = [], 0, 0, 0
            wide, long, own = asking, block.keys, asking * block.keys
        bucket.append(block)
        queries, keys, pairs = wide, long, own
    if bucket:
        yield bucket
