"""What moves a version from one side's ranks to the other's: copies of boxes, who makes them, and
what they come to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from transport.weights.layout.flat import ITEM_BYTES
from transport.weights.layout.layout import Ints, Layout, Shards, TensorLayout

Box = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
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
        return tuple(span.stop - span.start for span in self.destination_box)

    @property
    def dtype(self) -> str:
        """On the way: the smaller of both, so that a cast down happens before sending."""
        return smaller(self.source_dtype, self.destination_dtype)

    @property
    def nbytes(self) -> int:
        """On the way."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def smaller(source: str, destination: str) -> str:
    """The dtype in which a tensor travels: the destination's where it is smaller, else the
    source's.
    """
    return destination if ITEM_BYTES[destination] < ITEM_BYTES[source] else source


@dataclass(frozen=True, eq=False)
class Kind:
    """The copies of one tensor; all tensors that are dealt out alike on both sides share them."""

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
    place: Ints
    """[c]: number of the copy among those of its group."""
    per_tensor: Ints
    """[c]: copies of its group that one tensor has."""
    turn: Ints
    """[c]: whose turn it is in its group after the kinds before."""

    def senders(self, number: int) -> Ints:
        """[c]: rows of `source` that send, for the kind's tensor of this number.

        Of each tensor all holders send equally many copies, side by side, so that few pairs have to
        do with each other; those that are left over they take in turns, from tensor to tensor.
        """
        per_holder, remainder = np.divmod(self.per_tensor, self.count)
        over = self.place - per_holder * self.count
        taker = np.where(
            over < 0,
            self.place // np.maximum(per_holder, 1),
            (self.turn + number * remainder + over) % self.count,
        )
        return np.asarray(self.holders[self.first + taker])

    @functools.cached_property
    def elements(self) -> Ints:
        """[c]: of each box."""
        return np.asarray(np.prod(self.high - self.low, axis=1, dtype=np.int64))

    @functools.cached_property
    def turns(self) -> bool:
        """Whether the senders differ from tensor to tensor."""
        return bool((self.per_tensor % self.count).any())

    def between(
        self, source_rank: int | None, destination_rank: int | None, number: int
    ) -> list[Ends]:
        """The copies of the kind's tensor of this number, from this rank or to that one, or
        both.
        """
        mine = np.ones(len(self.to), bool)
        if destination_rank is not None:
            mine = self.destination.ranks[self.to] == destination_rank
        senders = self.senders(number)
        if source_rank is not None:
            mine = mine & (self.source.ranks[senders] == source_rank)
        chosen = np.flatnonzero(mine)
        rows, to, low, high = senders[chosen], self.to[chosen], self.low[chosen], self.high[chosen]
        ranks = self.source.ranks[rows].tolist(), self.destination.ranks[to].tolist()
        return list(
            zip(
                *ranks,
                _boxes(self.source, rows, low, high),
                _boxes(self.destination, to, low, high),
                strict=True,
            )
        )


Ends = tuple[int, int, Box, Box]
"""Source rank, destination rank, and the box in the local tensor of each."""


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """What moves a version from the source's ranks to the destination's; `reshard` makes it."""

    source: Layout
    destination: Layout
    kinds: tuple[tuple[Kind, tuple[tuple[TensorLayout, TensorLayout], ...]], ...]
    """Each with its tensors, as the two sides hold them."""

    def copies(
        self, *, source_rank: int | None = None, destination_rank: int | None = None
    ) -> Iterator[Copy]:
        """All copies, or those of one sender or one receiver (or one pair); the same order for both
        ends.
        """
        for kind, tensors in self.kinds:
            ends: list[Ends] = []
            for number, (origin, target) in enumerate(tensors):
                if number == 0 or kind.turns:
                    ends = kind.between(source_rank, destination_rank, number)
                for sender, receiver, source_box, destination_box in ends:
                    yield Copy(
                        tensor=target.name,
                        source_rank=sender,
                        destination_rank=receiver,
                        source_name=origin.into,
                        source_box=source_box,
                        destination_name=target.into,
                        destination_box=destination_box,
                        source_dtype=origin.dtype,
                        destination_dtype=target.dtype,
                    )

    def sends(self, rank: int) -> list[Copy]:
        """What a source rank sends, receiver by receiver."""
        return sorted(self.copies(source_rank=rank), key=lambda copy: copy.destination_rank)

    @property
    def pair_bytes(self) -> Ints:
        """[source ranks, destination ranks]: bytes on the way from each to each."""
        return self._pairs[0]

    @property
    def pair_copies(self) -> Ints:
        """[source ranks, destination ranks]: copies from each to each."""
        return self._pairs[1]

    @property
    def nbytes(self) -> int:
        """Bytes on the way in all."""
        return int(self.pair_bytes.sum())

    @functools.cached_property
    def _pairs(self) -> tuple[Ints, Ints]:
        sources, destinations = self.source.ranks, self.destination.ranks
        nbytes, copies = np.zeros((2, sources * destinations), np.int64)
        for kind, tensors in self.kinds:
            receivers = kind.destination.ranks[kind.to]
            origin, target = tensors[0]
            item = ITEM_BYTES[smaller(origin.dtype, target.dtype)]
            for number in range(len(tensors) if kind.turns else 1):
                times = 1 if kind.turns else len(tensors)
                pair = kind.source.ranks[kind.senders(number)] * destinations + receivers
                nbytes += np.bincount(pair, kind.elements * (item * times), len(nbytes)).astype(
                    np.int64
                )
                copies += np.bincount(pair, minlength=len(copies)) * times
        return nbytes.reshape(sources, destinations), copies.reshape(sources, destinations)


@dataclass(frozen=True, eq=False)
class JointPlan:
    """What moves a version from a trainer's ranks to those of several readers at once, in rounds:
    in each of them a rank sends to one other at most, and receives from one at most.
    """

    plans: tuple[CopyPlan, ...]
    """Of each reader."""
    ranks: tuple[int, ...]
    """Of each reader, counted on from one to the next; the last of them may hold nothing."""

    def at(self, destination_rank: int) -> tuple[CopyPlan, int]:
        """The plan of its reader, and its rank there."""
        for plan, ranks in zip(self.plans, self.ranks, strict=True):
            if destination_rank < ranks:
                return plan, destination_rank
            destination_rank -= ranks
        raise IndexError("the readers have no rank of that number")

    @functools.cached_property
    def pair_bytes(self) -> Ints:
        """[source ranks, destination ranks of all readers]: bytes on the way from each to each."""
        padded = [
            np.pad(plan.pair_bytes, ((0, 0), (0, ranks - plan.destination.ranks)))
            for plan, ranks in zip(self.plans, self.ranks, strict=True)
        ]
        return np.concatenate(padded, axis=1)

    @functools.cached_property
    def rounds(self) -> Ints:
        """[source ranks, destination ranks of all readers]: in which round each pair exchanges its
        bytes, -1 where it has none.
        """
        return matchings(self.pair_bytes)

    def receivers(self, source_rank: int) -> list[int]:
        """To whom a source rank sends, round by round; nobody, where it holds nothing."""
        return _in_order(self.rounds[source_rank : source_rank + 1].ravel())

    def senders(self, destination_rank: int) -> list[int]:
        """From whom a destination rank receives, round by round."""
        return _in_order(self.rounds[:, destination_rank])


def _in_order(rounds: Ints) -> list[int]:
    peers = np.flatnonzero(rounds >= 0)
    ordered: list[int] = peers[np.argsort(rounds[peers])].tolist()
    return ordered


def _boxes(shards: Shards, rows: Ints, low: Ints, high: Ints) -> list[Box]:
    """Where the ranges [low, high) [n, d] of the full tensor lie in the local tensors of these
    rows.
    """
    first = shards.local_start[rows]
    size: npt.NDArray[np.int64] = np.ones_like(first)
    lead = first.shape[1] - low.shape[1]
    first[:, lead:] += low - shards.start[rows]
    size[:, lead:] = high - low
    return [
        tuple(map(slice, a, b))
        for a, b in zip(first.tolist(), (first + size).tolist(), strict=True)
    ]


LIKE = 1.5
"""By how much the bytes of pairs may differ that are coloured together."""
NEAR = 1.1
"""Times what the busiest rank has to move: no other colouring is looked for."""


def matchings(pair_bytes: Ints) -> Ints:
    """[source ranks, destination ranks]: the number of the matching in which a pair exchanges its
    bytes `pair_bytes`; -1 where it has none.

    As many as the largest degree, or more where matchings of pairs of like sizes move their bytes
    sooner.
    """
    sources, destinations = np.nonzero(pair_bytes)
    nbytes = pair_bytes[sources, destinations]
    order = np.lexsort((destinations, sources, -nbytes))
    edges = list(zip(sources[order].tolist(), destinations[order].tolist(), strict=True))
    alike = _of_like_sizes(edges, nbytes[order].tolist())
    joined = _joined([_coloured(pair_bytes.shape, some) for some in alike or [edges]])
    busiest = max(int(pair_bytes.sum(axis=side).max(initial=0)) for side in (0, 1))
    if len(alike) < 2 or slowest(joined, pair_bytes).sum() < NEAR * busiest:
        return joined
    whole = _coloured(pair_bytes.shape, edges)
    return min((whole, joined), key=lambda table: int(slowest(table, pair_bytes).sum()))


def slowest(table: Ints, pair_bytes: Ints) -> Ints:
    """[matchings]: bytes of the largest pair of each."""
    largest = np.zeros(int(table.max(initial=-1)) + 1, np.int64)
    used = table >= 0
    np.maximum.at(largest, table[used], pair_bytes[used])
    return largest


def _of_like_sizes(
    edges: Sequence[tuple[int, int]], sizes: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """Edges whose sizes, which fall, are within `LIKE` of the first one's."""
    alike: list[list[tuple[int, int]]] = []
    largest = 0
    for edge, size in zip(edges, sizes, strict=True):
        if not alike or size * LIKE < largest:
            alike.append([])
            largest = size
        alike[-1].append(edge)
    return alike


def _joined(tables: Sequence[Ints]) -> Ints:
    """The matchings of several tables, which have no pair in common, one table after the other."""
    joined, first = tables[0].copy(), int(tables[0].max(initial=-1)) + 1
    for table in tables[1:]:
        used = table >= 0
        joined[used] = table[used] + first
        first += int(table.max(initial=-1)) + 1
    return joined


def _coloured(shape: tuple[int, ...], edges: Sequence[tuple[int, int]]) -> Ints:
    """A proper colouring of edges with as many colours as the largest degree, after Koenig: where
    an edge's ends have no free colour in common, two colours change places along the path that
    begins at one of them.
    """
    table: Ints = np.full(shape, -1, np.int64)
    if not edges:
        return table
    ends = np.array(edges)
    colours = max(int(np.bincount(ends[:, side]).max()) for side in (0, 1))
    every = (1 << colours) - 1
    free = tuple([every] * count for count in shape)
    partner = tuple([[-1] * colours for _ in range(count)] for count in shape)
    for source, destination in edges:
        common = free[0][source] & free[1][destination]
        if not common:
            first, second = _lowest(free[0][source]), _lowest(free[1][destination])
            _exchange(partner, free, destination, first, second)
            common = 1 << first
        colour = _lowest(common)
        partner[0][source][colour], partner[1][destination][colour] = destination, source
        free[0][source] &= ~(1 << colour)
        free[1][destination] &= ~(1 << colour)
    for source, mine in enumerate(partner[0]):
        for colour, destination in enumerate(mine):
            if destination >= 0:
                table[source, destination] = colour
    return table


def _exchange(
    partner: tuple[list[list[int]], ...],
    free: tuple[list[int], ...],
    destination: int,
    first: int,
    second: int,
) -> None:
    """Free the first colour at a destination, where the second one is free: the two change places
    along the path of edges of these colours that begins there.
    """
    side, at, colour = 1, destination, first
    path: list[tuple[int, int, int]] = []
    while (to := partner[side][at][colour]) >= 0:
        path.append((at, to, colour) if side == 0 else (to, at, colour))
        side, at, colour = 1 - side, to, first + second - colour
    for source, target, old in path:
        partner[0][source][old] = partner[1][target][old] = -1
        free[0][source] |= 1 << old
        free[1][target] |= 1 << old
    for source, target, old in path:
        new = first + second - old
        partner[0][source][new], partner[1][target][new] = target, source
        free[0][source] &= ~(1 << new)
        free[1][target] &= ~(1 << new)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
