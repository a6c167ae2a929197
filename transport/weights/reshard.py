"""From one layout to another: who sends which box to whom. Pure, computed once, replayed for every version.

Tensors that are dealt out alike on both sides share one table of copies, so that a plan's size follows the kinds of
tensors, not their number. Where several source ranks hold the same box, they take turns.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt

from transport.weights.errors import LayoutMismatch
from transport.weights.flat import ITEM_BYTES
from transport.weights.layout import Held, Layout
from transport.weights.shards import Ints, Shards

Box = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One box of one tensor, from one rank's local tensor into another's."""

    tensor: str
    """Name of the full tensor."""
    source_rank: int
    destination_rank: int
    source_name: str
    """The source rank's local tensor."""
    source_box: Box
    destination_name: str
    """The destination rank's local tensor."""
    destination_box: Box
    source_dtype: str
    destination_dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box, as the destination's local tensor has it."""
        return tuple(each.stop - each.start for each in self.destination_box)

    @property
    def dtype(self) -> str:
        """On the way: the smaller of both, so that a cast down happens before sending."""
        narrow = ITEM_BYTES[self.destination_dtype] < ITEM_BYTES[self.source_dtype]
        return self.destination_dtype if narrow else self.source_dtype

    @property
    def nbytes(self) -> int:
        """On the way."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, eq=False)
class Kind:
    """The copies of one tensor, and all tensors that have the same."""

    source: Shards
    destination: Shards
    low: Ints
    """[c, d]: first element of each box in the full tensor."""
    high: Ints
    """[c, d]: one past its last."""
    to: Ints
    """[c]: row of `destination`."""
    holders: Ints
    """[h]: rows of `source`; those that hold one cell stand together."""
    first: Ints
    """[c]: where the cell's holders begin."""
    count: Ints
    """[c]: how many they are."""
    group: Ints
    """[c]: number of the set of ranks that hold it."""
    groups: tuple[bytes, ...]
    """These sets."""
    turn: Ints
    """[c]: number of the copy among those of its group."""
    per_tensor: Ints
    """[c]: copies of its group that one tensor has."""

    def senders(self, number: int) -> Ints:
        """[c]: rows of `source` that send, for the kind's tensor of this number."""
        return np.asarray(self.holders[self.first + (self.turn + number * self.per_tensor) % self.count])

    @functools.cached_property
    def elements(self) -> Ints:
        """[c]: of each box."""
        return np.asarray(np.prod(self.high - self.low, axis=1, dtype=np.int64))

    @property
    def turns(self) -> bool:
        """Whether the senders differ from tensor to tensor."""
        return bool((self.count > 1).any())


@dataclass(frozen=True, eq=False)
class Plan:
    """What moves a version from the source's ranks to the destination's."""

    source: Layout
    destination: Layout
    kinds: tuple[tuple[Kind, tuple[tuple[Held, Held], ...]], ...]
    """Each with its tensors, as the two sides hold them."""

    def copies(self, *, source_rank: int | None = None, destination_rank: int | None = None) -> Iterator[Copy]:
        """All copies, or those of one sender or one receiver (or one pair); the same order for both ends."""
        for kind, tensors in self.kinds:
            mine = np.ones(len(kind.to), bool)
            if destination_rank is not None:
                mine = kind.destination.ranks[kind.to] == destination_rank
            if source_rank is not None:
                mine &= _may_send(kind, source_rank)
            for number, (held, wanted) in enumerate(tensors) if mine.any() else ():
                senders = kind.senders(number)
                chosen = mine if source_rank is None else mine & (kind.source.ranks[senders] == source_rank)
                for at in np.flatnonzero(chosen).tolist():
                    yield _copy(kind, held, wanted, at, int(senders[at]))

    def sends(self, rank: int) -> list[Copy]:
        """What a source rank sends, receiver by receiver."""
        return sorted(self.copies(source_rank=rank), key=lambda copy: copy.destination_rank)

    def receives(self, rank: int) -> list[Copy]:
        """What a destination rank receives, sender by sender."""
        return sorted(self.copies(destination_rank=rank), key=lambda copy: copy.source_rank)

    @functools.cached_property
    def pair_bytes(self) -> Ints:
        """[source ranks, destination ranks]: bytes on the way from each to each."""
        return self._table(nbytes=True)

    @functools.cached_property
    def pair_copies(self) -> Ints:
        """[source ranks, destination ranks]: copies from each to each."""
        return self._table(nbytes=False)

    @property
    def nbytes(self) -> int:
        """Bytes on the way in all."""
        return int(self.pair_bytes.sum())

    def _table(self, nbytes: bool) -> Ints:
        table = np.zeros((self.source.ranks, self.destination.ranks), np.int64)
        for kind, tensors in self.kinds:
            receivers = kind.destination.ranks[kind.to]
            weight = np.ones(len(kind.to), np.int64)
            if nbytes:
                held, wanted = tensors[0]
                weight = kind.elements * min(ITEM_BYTES[held.dtype], ITEM_BYTES[wanted.dtype])
            for number in range(len(tensors) if kind.turns else 1):
                times = 1 if kind.turns else len(tensors)
                np.add.at(table, (kind.source.ranks[kind.senders(number)], receivers), weight * times)
        return table


@functools.lru_cache(maxsize=64)
def reshard(source: Layout, destination: Layout) -> Plan:
    """The copies that fill every destination byte exactly once.

    LayoutMismatch where the destination wants a tensor, or a part of one, that no source rank holds."""
    kinds: dict[tuple[Shards, Shards, str, str], list[tuple[Held, Held]]] = {}
    for name, wanted in destination.tensors.items():
        held = _held(source, destination, name, wanted)
        kinds.setdefault((held.shards, wanted.shards, held.dtype, wanted.dtype), []).append((held, wanted))
    turns: dict[bytes, int] = {}
    made = []
    for (held_by, wanted_by, _, _), tensors in kinds.items():
        found = _intersect(held_by, wanted_by)
        if found is None:
            raise LayoutMismatch(
                f"a part of '{tensors[0][0].name}' that the destination needs is held by no source rank; found boxes "
                f"{held_by.start.tolist()[:4]} to {held_by.stop.tolist()[:4]}; complete the source's layout"
            )
        made.append((_take_turns(found, len(tensors), turns), tuple(tensors)))
    return Plan(source, destination, tuple(made))


def _held(source: Layout, destination: Layout, name: str, wanted: Held) -> Held:
    travels = source.aliases.get(name, name)
    if travels not in source.tensors:
        raise LayoutMismatch(
            f"the destination wants tensor '{name}', which the source does not have; found {len(source.tensors)} "
            f"tensors, first {list(source.tensors)[:3]}; both sides must describe the same model, by the same names"
        )
    apart = [
        alias for alias, of in destination.aliases.items()
        if of == name and source.aliases.get(alias, alias) in source.tensors
        and source.aliases.get(alias, alias) != travels
    ]  # fmt: skip
    if apart:
        raise LayoutMismatch(
            f"the destination ties '{apart[0]}' to '{name}', but the source trains them apart; untie them there"
        )
    held = source.tensors[travels]
    if held.shape != wanted.shape:
        raise LayoutMismatch(
            f"tensor '{name}' has two shapes; found {list(held.shape)} at the source, {list(wanted.shape)} at the "
            "destination; both sides must load the same model"
        )
    return held


def _take_turns(kind: Kind, tensors: int, turns: dict[bytes, int]) -> Kind:
    """Let the turns of each set of holders go on where the kinds before ended."""
    if not kind.turns:
        return kind
    turn = kind.turn.copy()
    for number, ranks in enumerate(kind.groups):
        mine = kind.group == number
        turn[mine] += turns.get(ranks, 0)
        turns[ranks] = turns.get(ranks, 0) + tensors * int(mine.sum())
    return replace(kind, turn=turn)


def _may_send(kind: Kind, rank: int) -> npt.NDArray[np.bool_]:
    """[c]: whether this source rank is among the holders."""
    ends = np.concatenate([[0], np.cumsum(kind.source.ranks[kind.holders] == rank)])
    return np.asarray(ends[kind.first + kind.count] > ends[kind.first])


def _copy(kind: Kind, held: Held, wanted: Held, at: int, sender: int) -> Copy:
    low, high, receiver = kind.low[at], kind.high[at], int(kind.to[at])
    return Copy(
        tensor=wanted.name,
        source_rank=int(kind.source.ranks[sender]),
        destination_rank=int(kind.destination.ranks[receiver]),
        source_name=held.into,
        source_box=_box(kind.source, sender, low, high),
        destination_name=wanted.into,
        destination_box=_box(kind.destination, receiver, low, high),
        source_dtype=held.dtype,
        destination_dtype=wanted.dtype,
    )


def _box(shards: Shards, row: int, low: Ints, high: Ints) -> Box:
    """Where the range [low, high) of the full tensor lies in the row's local tensor."""
    first = shards.local_start[row].copy()
    size = np.ones_like(first)
    lead = len(first) - len(low)
    first[lead:] += low - shards.start[row]
    size[lead:] = high - low
    return tuple(slice(a, a + n) for a, n in zip(first.tolist(), size.tolist(), strict=True))


@functools.lru_cache(maxsize=1024)
def _intersect(source: Shards, destination: Shards) -> Kind | None:
    """The copies of one tensor; None where a part is held by nobody."""
    low, high, holders, begins = _cells(source)
    wanted, place = _distinct(destination)
    d = low.shape[1]
    start, stop = wanted[:, :d], wanted[:, d:]
    overlap = np.ones((len(wanted), len(low)), bool)
    for dim in range(d):
        overlap &= np.maximum.outer(start[:, dim], low[:, dim]) < np.minimum.outer(stop[:, dim], high[:, dim])
    box, cell = np.nonzero(overlap)
    first, last = np.maximum(start[box], low[cell]), np.minimum(stop[box], high[cell])
    covered = np.bincount(box, np.prod(last - first, axis=1, dtype=np.int64), len(wanted))
    if (covered != np.prod(stop - start, axis=1, dtype=np.int64)).any():
        return None
    # Every replica of a destination box gets the box's copies.
    replicas = np.argsort(place, kind="stable")
    per_box = np.bincount(place, minlength=len(wanted))
    offset = np.concatenate([[0], np.cumsum(per_box)])
    times = per_box[box]
    which = np.repeat(np.arange(len(box)), times)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(times) - times, times)
    to = replicas[offset[box[which]] + nth]
    order = np.lexsort((cell[which], to))
    which, to = which[order], to[order]
    return _kind(source, destination, first[which], last[which], to, cell[which], holders, begins)


def _kind(
    source: Shards, destination: Shards, low: Ints, high: Ints, to: Ints, cell: Ints, holders: Ints, begins: Ints
) -> Kind:
    """Number the copies of each set of holders; cells may differ and still be held by the same ranks."""
    sets: dict[bytes, int] = {}
    of_cell = np.array([
        sets.setdefault(source.ranks[holders[a:b]].tobytes(), len(sets)) for a, b in itertools.pairwise(begins.tolist())
    ])  # fmt: skip
    group = of_cell[cell]
    turn, per_tensor = _numbers(group)
    count = begins[cell + 1] - begins[cell]
    return Kind(source, destination, low, high, to, holders, begins[cell], count, group, tuple(sets), turn, per_tensor)


def _cells(shards: Shards) -> tuple[Ints, Ints, Ints, Ints]:
    """Boxes that do not overlap and make up all that is held: low, high [c, d]; the rows of `shards` that hold each,
    one after the other in order of their ranks, and where each cell's begin [c + 1]."""
    boxes, place = _distinct(shards)
    d = shards.start.shape[1]
    low, high = boxes[:, :d], boxes[:, d:]
    holds: npt.NDArray[np.bool_] | None = None
    if len(boxes) < len(place):
        holds = place[None, :] == np.arange(len(boxes))[:, None]
    if not _disjoint(low, high):
        cuts = [np.unique(np.concatenate([low[:, dim], high[:, dim]])) for dim in range(d)]
        corner = np.stack([each.ravel() for each in np.meshgrid(*(np.arange(len(c) - 1) for c in cuts), indexing="ij")])
        low = np.stack([cut[at] for cut, at in zip(cuts, corner, strict=True)], axis=1)
        high = np.stack([cut[at + 1] for cut, at in zip(cuts, corner, strict=True)], axis=1)
        inside = np.ones((len(low), len(shards.ranks)), bool)
        for dim in range(d):
            inside &= np.less_equal.outer(low[:, dim], shards.stop[:, dim] - 1)
            inside &= np.greater_equal.outer(low[:, dim], shards.start[:, dim])
        held = inside.any(axis=1)
        low, high, holds = low[held], high[held], inside[held]
    by_rank = np.argsort(shards.ranks, kind="stable")
    if holds is None:
        holders = np.empty(len(place), np.int64)
        holders[place] = np.arange(len(place))
        return low, high, holders, np.arange(len(place) + 1)
    cell, row = np.nonzero(holds[:, by_rank])
    return low, high, by_rank[row], np.concatenate([[0], np.cumsum(np.bincount(cell, minlength=len(low)))])


def _distinct(shards: Shards) -> tuple[Ints, Ints]:
    """Distinct boxes [b, 2 d], and for each row of `shards` the number of its box."""
    boxes = np.concatenate([shards.start, shards.stop], axis=1)
    if not boxes.shape[1]:
        return boxes[:1], np.zeros(len(boxes), np.int64)
    found, place = np.unique(boxes, axis=0, return_inverse=True)
    return found, place.reshape(-1)


def _disjoint(low: Ints, high: Ints) -> bool:
    overlap = np.ones((len(low), len(low)), bool)
    for dim in range(low.shape[1]):
        overlap &= np.maximum.outer(low[:, dim], low[:, dim]) < np.minimum.outer(high[:, dim], high[:, dim])
    return int(overlap.sum()) == len(low)


def _numbers(group: Ints) -> tuple[Ints, Ints]:
    """For each entry: its number among the equal ones, and how many they are."""
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    new = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    starts = np.flatnonzero(new)
    sizes = np.diff([*starts, len(group)])
    number = np.empty(len(group), np.int64)
    number[order] = np.arange(len(group)) - np.repeat(starts, sizes)
    size = np.empty(len(group), np.int64)
    size[order] = np.repeat(sizes, sizes)
    return number, size
