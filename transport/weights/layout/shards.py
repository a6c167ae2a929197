"""How one full tensor is dealt out: which box of it each rank holds, and where the box lies in the
rank's memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from transport.weights.errors import LayoutMismatch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Shards:
    """The boxes of one full tensor of d dimensions, row by row; ranks that hold nothing of it have
    no row.

    A rank may hold several boxes, and several ranks the same one (replicas). The box lies in a
    local tensor of k >= d dimensions; where k > d, it has size 1 along the leading ones (an expert
    within a stack of experts).
    """

    ranks: Ints
    """[n]"""
    start: Ints
    """[n, d]: first element of the box in the full tensor."""
    stop: Ints
    """[n, d]: one past its last."""
    local_start: Ints
    """[n, k]: first element of the box in the local tensor."""
    local_shape: Ints
    """[n, k]: shape of the local tensor."""

    def __post_init__(self) -> None:
        for values in (self.ranks, self.start, self.stop, self.local_start, self.local_shape):
            values.setflags(write=False)
        n, k = len(self.ranks), self.local_start.shape[1]
        size = np.ones((n, k), np.int64)
        size[:, k - self.start.shape[1] :] = self.stop - self.start
        if (self.stop <= self.start).any() or (self.start < 0).any():
            raise LayoutMismatch(
                f"a shard must be a box that is not empty; found starts {self.start.tolist()[:4]}"
                f" and stops {self.stop.tolist()[:4]}; leave out ranks that hold nothing"
            )
        if (self.local_start < 0).any() or (self.local_start + size > self.local_shape).any():
            raise LayoutMismatch(
                "a shard must lie inside its rank's local tensor; found one that reaches beyond it;"
                " see local_start and local_shape"
            )

    @functools.cached_property
    def key(self) -> bytes:
        """Equal for equal shards."""
        digest = xxhash.xxh3_128()
        for values in (self.ranks, self.start, self.stop, self.local_start, self.local_shape):
            digest.update(repr(values.shape).encode())
            digest.update(np.ascontiguousarray(values).data)
        return digest.digest()

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shards) and self.key == other.key

    def cuts_rows(self, columns: int) -> bool:
        """Whether some box has a part of its rows alone, which are `columns` long (the last
        dimension).
        """
        return bool((self.start[:, -1] > 0).any() or (self.stop[:, -1] < columns).any())

    @functools.lru_cache(maxsize=1024)  # noqa: B019  (shards are values, and equal ones are one entry)
    def of_rows(self) -> Shards:
        """Of a tensor with one number for each row of this one [..., rows, 1]: ranks hold those of
        their rows, once.
        """
        sides = ((self.start, 0), (self.stop, 1), (self.local_start, 0), (self.local_shape, 1))
        ended = [
            np.concatenate([side[:, :-1], np.full_like(side[:, -1:], end)], axis=1)
            for side, end in sides
        ]
        boxes = np.concatenate([self.ranks[:, None], *ended], axis=1)
        first = np.sort(np.unique(boxes, axis=0, return_index=True)[1])
        return Shards(self.ranks[first], *(side[first] for side in ended))

    @classmethod
    def boxes(cls, ranks: Sequence[int] | Ints, start: Ints, stop: Ints) -> Shards:
        """Boxes that are local tensors of their own; empty ones are left out."""
        nonempty = (stop > start).all(axis=1)
        start, stop = start[nonempty].astype(np.int64), stop[nonempty].astype(np.int64)
        return cls(
            np.asarray(ranks, np.int64)[nonempty], start, stop, np.zeros_like(start), stop - start
        )

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def cut(
        cls,
        shape: tuple[int, ...],
        mesh: Mesh,
        cuts: tuple[int | None, ...],
        order: tuple[int, ...] | None = None,
        parts: tuple[int, ...] | None = None,
    ) -> Shards:
        """Dealt out over a mesh: mesh dimension i cuts tensor dimension `cuts[i]`, or None: it
        holds replicas.

        order: mesh dimensions in the order in which they cut, left to right if not given. (FSDP2
        over tensor parallel on one dimension cuts by tp first: order=(1, 0) for a mesh of fsdp x
        tp.) Each cut is torch.chunk: pieces of ceil(length / ranks), uneven or empty at the end.
        parts: for each mesh dimension, into how many parts the length is chunked before each part
        is dealt out by itself, one if not given. (A packed gate_up of which every rank holds rows
        of both: 2.)
        """
        axes = tuple(range(len(mesh.shape)))
        if (
            len(cuts) != len(axes)
            or any(c is not None and not 0 <= c < len(shape) for c in cuts)
            or sorted(order or axes) != list(axes)
            or len(parts or axes) != len(axes)
        ):
            raise LayoutMismatch(
                f"a tensor of shape {list(shape)} cannot be cut by {list(cuts)} over a mesh of"
                f" shape {list(mesh.shape)}; found order {order}, parts {parts}; give for each mesh"
                " dimension a dimension of the tensor, or None, and each mesh dimension once in"
                " `order`"
            )
        place = np.indices(mesh.shape).reshape(len(axes), -1)
        size = np.broadcast_to(np.asarray(shape, np.int64), (place.shape[1], len(shape))).copy()
        row = np.arange(len(size))
        low, high, local = np.zeros_like(size), size.copy(), np.zeros_like(size)
        for axis in order or axes:
            dim = cuts[axis]
            if dim is None:
                continue
            begin, end = _deal(
                size[:, dim], parts[axis] if parts else 1, place[axis], mesh.shape[axis]
            )
            count = begin.shape[1]
            low, high, local, row = (
                np.repeat(array, count, axis=0) for array in (low, high, local, row)
            )
            at = row, np.tile(np.arange(count), len(row) // count)
            first = np.maximum(local[:, dim], begin[at])
            last = np.minimum(local[:, dim] + high[:, dim] - low[:, dim], end[at])
            low[:, dim] += first - local[:, dim]
            high[:, dim] = low[:, dim] + last - first
            lengths = end - begin
            local[:, dim] = (np.cumsum(lengths, axis=1) - lengths)[at] + first - begin[at]
            size[:, dim] = lengths.sum(axis=1)
        nonempty = (high > low).all(axis=1)
        row = row[nonempty]
        return cls(
            np.asarray(mesh.ranks, np.int64)[row],
            low[nonempty],
            high[nonempty],
            local[nonempty],
            size[row],
        )


def _deal(length: Ints, parts: int, place: Ints, ranks: int) -> tuple[Ints, Ints]:
    """Begin and end [n, parts] of each place's share of its length [n], dealt out to so many ranks
    part by part.
    """
    part = -(-length // parts)
    first = np.minimum(part[:, None] * np.arange(parts), length[:, None])
    last = np.minimum(first + part[:, None], length[:, None])
    piece = -(-(last - first) // ranks)
    begin = np.minimum(first + place[:, None] * piece, last)
    return begin, np.minimum(begin + piece, last)


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid, e.g. fsdp x tp."""

    shape: tuple[int, ...]
    """Ranks along each dimension."""
    ranks: tuple[int, ...]
    """The rank at each place, the last dimension running fastest."""

    def __post_init__(self) -> None:
        if (
            int(np.prod(self.shape)) != len(self.ranks)
            or len(set(self.ranks)) != len(self.ranks)
            or not self.ranks
        ):
            raise LayoutMismatch(
                f"a mesh of shape {list(self.shape)} needs as many ranks, each once; found"
                f" {list(self.ranks)[:8]}"
            )

    @classmethod
    def of(cls, *shape: int, first: int = 0) -> Mesh:
        """Ranks first, first + 1, ... in a grid of this shape."""
        return cls(shape, tuple(range(first, first + int(np.prod(shape)))))
