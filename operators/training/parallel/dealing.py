"""Deals the rollouts of a step out to ranks, in as many micro-batches on each, of like size: pure
functions.

The ranks meet in every layer of every micro-batch, so what counts is the largest of the
micro-batches that stand at the same place. Units (groups, or pieces of them) go to the least loaded
of all micro-batches, largest first, which leaves at most one unit between the fullest and the
emptiest; sorted by size and dealt out row by row, what the ranks wait for one another in a whole
step is then at most one unit.

Axis suffixes as in `operators.training.learner.packing`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from operators.training.learner.packing import Array, cost

FINENESS = (1, 2, 4)
"""Into what part of an even share groups are cut: the coarsest of those that let a step be over
soonest. A finer cut computes common prefixes more often."""


@dataclass(frozen=True)
class DealtRollouts:
    """Rollouts that stay together."""

    first: int
    last: int
    """Rollouts [first, last)."""
    cost: int
    """Tokens, a common prefix counted once."""


def deal(
    tokens_S: Array, offsets: Array, groups_R: Array, ranks: int, limit: int, *, whole: bool = False
) -> list[list[Array]]:
    """The micro-batches of each rank: index arrays into R, as many for every rank, some of them
    empty.

    tokens_S: [S]. offsets: [R + 1] into S. groups_R: [R], equal within a group, rows of a group
    side by side. limit: tokens of a micro-batch; a unit above it is one of its own. whole: groups
    are never cut; else those that are larger than an even share of the step are, or than a part of
    it (`FINENESS`)."""
    groups = units(tokens_S, offsets, groups_R)
    total = sum(unit.cost for unit in groups)
    count = -(-total // (limit * ranks))
    while groups:
        shares = [min(limit, max(1, total // (count * ranks * fine))) for fine in FINENESS]
        cuts = (
            [groups]
            if whole
            else [
                [part for unit in groups for part in pieces(tokens_S, offsets, unit, share, limit)]
                for share in shares
            ]
        )
        dealt = [(cut, spread([unit.cost for unit in cut], ranks, count)) for cut in cuts]
        cut, found = min(dealt, key=lambda each: waited([unit.cost for unit in each[0]], each[1]))
        costs = [unit.cost for unit in cut]
        if max(sum(costs[number] for number in each) for bins in found for each in bins) <= max(
            limit, *costs
        ):
            return [
                [_rollouts([cut[number] for number in each]) for each in bins] for bins in found
            ]
        count += 1
    return [[] for _ in range(ranks)]


def units(tokens_S: Array, offsets: Array, groups_R: Array) -> list[DealtRollouts]:
    """The groups, and what each costs."""
    rollouts = len(groups_R)
    starts = np.flatnonzero(np.r_[True, groups_R[1:] != groups_R[:-1]]).tolist() if rollouts else []
    return [
        DealtRollouts(first, last, cost(tokens_S, offsets, first, last))
        for first, last in itertools.pairwise([*starts, rollouts])
    ]


def pieces(
    tokens_S: Array, offsets: Array, unit: DealtRollouts, share: int, limit: int
) -> list[DealtRollouts]:
    """A unit above `share` tokens in as many pieces of neighbouring rollouts, of like size; those
    that are above `limit` in more, where they are not one rollout."""
    rollouts = unit.last - unit.first
    count = min(rollouts, -(-unit.cost // share))
    if count <= 1:
        return [unit]
    ends = offsets[unit.first : unit.last + 1] - offsets[unit.first]
    marks = np.searchsorted(ends, np.arange(1, count) * ends[-1] / count).clip(1, rollouts - 1)
    found = []
    for first, last in itertools.pairwise(
        np.unique([unit.first, *(unit.first + marks), unit.last]).tolist()
    ):
        part = DealtRollouts(first, last, cost(tokens_S, offsets, first, last))
        found += [part] if part.cost <= limit else pieces(tokens_S, offsets, part, limit, limit)
    return found


def spread(costs: Sequence[int], ranks: int, count: int) -> list[list[list[int]]]:
    """Numbers of the costs in each of `count` bins of each rank; bins of like load stand at the
    same place."""
    bins = sorted(
        fill(costs, ranks * count), key=lambda each: -sum(costs[number] for number in each)
    )
    return [bins[rank::ranks] for rank in range(ranks)]


def waited(costs: Sequence[int], bins: Sequence[Sequence[Sequence[int]]]) -> int:
    """Tokens that a rank waits for in a whole step: the most at each place, over the places."""
    return sum(
        max(sum(costs[number] for number in each) for each in at) for at in zip(*bins, strict=True)
    )


def fill(costs: Sequence[int], bins: int) -> list[list[int]]:
    """Numbers of the costs in each bin: the largest first, each to the bin that holds least."""
    found: list[list[int]] = [[] for _ in range(bins)]
    held = [(0, number) for number in range(bins)]
    for number in sorted(range(len(costs)), key=lambda at: (-costs[at], at)):
        load, least = heapq.heappop(held)
        found[least].append(number)
        heapq.heappush(held, (load + costs[number], least))
    return found


def _rollouts(together: Sequence[DealtRollouts]) -> Array:
    """Those of some units, in order."""
    parts = [
        np.arange(unit.first, unit.last) for unit in sorted(together, key=lambda unit: unit.first)
    ]
    return np.concatenate([np.zeros(0, np.int64), *parts])
