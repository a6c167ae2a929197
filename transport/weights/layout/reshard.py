"""From one layout to another: who sends which box to whom. Pure, computed once, replayed for every
version.

Tensors that are dealt out alike on both sides share one table of copies, so that a plan's size
follows the kinds of tensors, not their number. Where several source ranks hold the same box, they
share the work.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from transport.weights.errors import LayoutMismatch
from transport.weights.layout.layout import Ints, Layout, Shards, TensorLayout
from transport.weights.layout.plan import Box, Copy, CopyPlan, Kind

__all__ = ["Box", "Copy", "CopyPlan", "Kind", "reshard"]


@functools.lru_cache(maxsize=64)
def reshard(source: Layout, destination: Layout) -> CopyPlan:
    """The copies that fill every destination byte exactly once.

    LayoutMismatch where the destination wants a tensor, or a part of one, that no source rank
    holds.
    """
    kinds: dict[tuple[Shards, Shards, str, str], list[tuple[TensorLayout, TensorLayout]]] = {}
    for name, target in destination.tensors.items():
        if not len(target.shards.ranks):
            continue
        origin = _held(source, destination, name, target)
        kinds.setdefault((origin.shards, target.shards, origin.dtype, target.dtype), []).append(
            (origin, target)
        )
    turns: dict[bytes, int] = {}
    copies = []
    for (held_by, wanted_by, _, _), tensors in kinds.items():
        kind = _intersect(held_by, wanted_by)
        if kind is None:
            raise LayoutMismatch(
                f"a part of '{tensors[0][0].name}' that the destination needs is held by no source"
                f" rank; found boxes {held_by.start.tolist()[:4]} to {held_by.stop.tolist()[:4]};"
                " complete the source's layout"
            )
        copies.append((_take_turns(kind, len(tensors), turns), tuple(tensors)))
    return CopyPlan(source, destination, tuple(copies))


def _held(source: Layout, destination: Layout, name: str, target: TensorLayout) -> TensorLayout:
    """The source's tensor that fills the destination's of this name, or of a name that is tied to
    it there.
    """
    names = [name, *(alias for alias, of in destination.aliases.items() if of == name)]
    travels = dict.fromkeys(source.aliases.get(tied, tied) for tied in names)
    candidates = [source.tensors[tied] for tied in travels if tied in source.tensors]
    if not candidates:
        raise LayoutMismatch(
            f"the destination wants tensor '{name}', which the source does not have; found"
            f" {len(source.tensors)} tensors, first {list(source.tensors)[:3]}; both sides must"
            " describe the same model, by the same names"
        )
    if len(candidates) > 1:
        raise LayoutMismatch(
            f"the destination ties tensors that the source trains apart; found {names} there, "
            f"{[candidate.name for candidate in candidates]} at the source; untie them at the"
            " destination"
        )
    if candidates[0].shape != target.shape:
        raise LayoutMismatch(
            f"tensor '{name}' has two shapes; found {list(candidates[0].shape)} at the source,"
            f" {list(target.shape)} at the destination; both sides must load the same model"
        )
    return candidates[0]


def _take_turns(kind: Kind, tensors: int, turns: dict[bytes, int]) -> Kind:
    """Let the turns of each set of holders go on where the kinds before ended."""
    begin = np.array([turns.get(ranks, 0) for ranks in kind.groups], np.int64)
    remainder = np.zeros_like(begin)
    remainder[kind.group] = kind.per_tensor % kind.count
    turns.update(zip(kind.groups, (begin + tensors * remainder).tolist(), strict=True))
    return replace(kind, turn=begin[kind.group])


@functools.lru_cache(maxsize=1024)
def _intersect(source: Shards, destination: Shards) -> Kind | None:
    """The copies of one tensor; None where no rank holds some part."""
    low, high, holders, begins = _cells(source)
    distinct, place = _distinct(destination)
    d = low.shape[1]
    start, stop = distinct[:, :d], distinct[:, d:]
    overlap = np.ones((len(distinct), len(low)), bool)
    for dim in range(d):
        overlap &= np.maximum.outer(start[:, dim], low[:, dim]) < np.minimum.outer(
            stop[:, dim], high[:, dim]
        )
    box, cell = np.nonzero(overlap)
    first, last = np.maximum(start[box], low[cell]), np.minimum(stop[box], high[cell])
    covered = np.bincount(box, np.prod(last - first, axis=1, dtype=np.int64), len(distinct))
    if (covered != np.prod(stop - start, axis=1, dtype=np.int64)).any():
        return None
    # Every replica of a destination box gets the box's copies.
    replicas = np.argsort(_short(place), kind="stable")
    per_box = np.bincount(place, minlength=len(distinct))
    offset = np.concatenate([[0], np.cumsum(per_box)])
    times = per_box[box]
    piece = np.repeat(np.arange(len(box)), times)
    nth = np.arange(len(piece)) - np.repeat(np.cumsum(times) - times, times)
    to = replicas[offset[box[piece]] + nth]
    order = np.lexsort((_short(cell[piece]), _short(to)))
    piece, to = piece[order], to[order]
    return _kind(source, destination, first[piece], last[piece], to, cell[piece], holders, begins)


def _kind(
    source: Shards,
    destination: Shards,
    low: Ints,
    high: Ints,
    to: Ints,
    cell: Ints,
    holders: Ints,
    begins: Ints,
) -> Kind:
    """Number the copies of each set of holders; cells may differ and still be held by the same
    ranks.
    """
    sets: dict[bytes, int] = {}
    of_cell = np.array(
        [
            sets.setdefault(source.ranks[holders[a:b]].tobytes(), len(sets))
            for a, b in itertools.pairwise(begins.tolist())
        ]
    )
    group = of_cell[cell]
    place, per_tensor = _numbers(group)
    return Kind(
        source,
        destination,
        low,
        high,
        to,
        holders,
        begins[cell],
        begins[cell + 1] - begins[cell],
        group,
        tuple(sets),
        place,
        per_tensor,
        np.zeros_like(place),
    )


def _cells(shards: Shards) -> tuple[Ints, Ints, Ints, Ints]:
    """Boxes that do not overlap and make up all that is held: low, high [c, d]; the rows of
    `shards` that hold each, one per rank and in order of the ranks, and where each cell's begin [c
    + 1].
    """
    boxes, place = _distinct(shards)
    d = shards.start.shape[1]
    low, high = boxes[:, :d], boxes[:, d:]
    holds: npt.NDArray[np.bool_] | None = None
    if len(boxes) < len(place):
        holds = place[None, :] == np.arange(len(boxes))[:, None]
    if not _disjoint(low, high):
        cuts = [np.unique(np.concatenate([low[:, dim], high[:, dim]])) for dim in range(d)]
        corner = np.stack(
            [
                grid.ravel()
                for grid in np.meshgrid(*(np.arange(len(c) - 1) for c in cuts), indexing="ij")
            ]
        )
        low = np.stack([cut[at] for cut, at in zip(cuts, corner, strict=True)], axis=1)
        high = np.stack([cut[at + 1] for cut, at in zip(cuts, corner, strict=True)], axis=1)
        inside = np.ones((len(low), len(shards.ranks)), bool)
        for dim in range(d):
            inside &= np.less_equal.outer(low[:, dim], shards.stop[:, dim] - 1)
            inside &= np.greater_equal.outer(low[:, dim], shards.start[:, dim])
        is_held = inside.any(axis=1)
        low, high, holds = low[is_held], high[is_held], inside[is_held]
    by_rank = np.argsort(shards.ranks, kind="stable")
    if holds is None:
        holders = np.empty(len(place), np.int64)
        holders[place] = np.arange(len(place))
        return low, high, holders, np.arange(len(place) + 1)
    cell, row = np.nonzero(holds[:, by_rank])
    row = by_rank[row]
    again = (np.diff(cell, prepend=-1) == 0) & (np.diff(shards.ranks[row], prepend=-1) == 0)
    cell, row = cell[~again], row[~again]
    return low, high, row, np.concatenate([[0], np.cumsum(np.bincount(cell, minlength=len(low)))])


def _distinct(shards: Shards) -> tuple[Ints, Ints]:
    """Distinct boxes [b, 2 d], and for each row of `shards` the number of its box."""
    boxes = np.concatenate([shards.start, shards.stop], axis=1)
    if not boxes.shape[1]:
        return boxes[:1], np.zeros(len(boxes), np.int64)
    distinct, place = np.unique(boxes, axis=0, return_inverse=True)
    return distinct, place.reshape(-1)


def _disjoint(low: Ints, high: Ints) -> bool:
    overlap = np.ones((len(low), len(low)), bool)
    for dim in range(low.shape[1]):
        overlap &= np.maximum.outer(low[:, dim], low[:, dim]) < np.minimum.outer(
            high[:, dim], high[:, dim]
        )
    return int(overlap.sum()) == len(low)


def _numbers(group: Ints) -> tuple[Ints, Ints]:
    """For each entry: its number among the equal ones, and how many they are."""
    counts = np.bincount(group)
    number = np.empty_like(group)
    number[np.argsort(_short(group), kind="stable")] = np.arange(len(group)) - np.repeat(
        np.cumsum(counts) - counts, counts
    )
    return number, counts[group]


def _short(numbers: Ints) -> npt.NDArray[Any]:
    """The same numbers, from 0 on, in 16 bits where they fit, which numpy sorts many times
    faster.
    """
    return numbers.astype(np.uint16) if int(np.max(numbers, initial=0)) < 1 << 16 else numbers
