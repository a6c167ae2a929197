"""In which order the pairs of a plan exchange their bytes: in matchings, in each of which a rank
sends to one other at most and receives from one at most. Pure, and the same on every rank.

A rank goes through its pairs in the order of their matchings. All that a pair waits for lies in
earlier ones, so no two ranks wait for each other; and a rank has one message under way at a time,
whatever the number of its peers. By Koenig's theorem the pairs of a bipartite graph, an edge each,
can be coloured with as many colours as the busiest rank has peers. Pairs of like sizes are coloured
together where that is faster: a matching takes as long as its largest pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transport.weights.layout.shards import Ints

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
