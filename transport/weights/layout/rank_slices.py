"""Which part of each full tensor a local one holds: a reader that is one rank of several takes its
slices alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from transport.weights.errors import LayoutMismatch
from transport.weights.layout.flat import FlatLayout, Shaped
from transport.weights.layout.layout import Layout, Shards, TensorLayout

T = TypeVar("T", bound=Shaped)

RankSlice = tuple[Sequence[int], int | None, Sequence[Sequence[int]]]
"""(shape of the full tensor, dimension along which it is cut, ranges [first, last) along it, end to
end in the local tensor); without a dimension: all of it. Lists do as well, as msgpack gives
them."""


@dataclass(frozen=True)
class LocalTensor(Generic[T]):
    """A local tensor, and what it holds of the full one."""

    local: T
    shape: tuple[int, ...]
    """Of the full tensor, which is what the layout tells."""
    dim: int = 0
    runs: tuple[tuple[int, int], ...] | None = None
    """None: all of it."""

    def cuts(self) -> Iterator[tuple[int, int, int]]:
        """(first index in the local tensor, first in the full one, length) of each run."""
        at = 0
        for first, last in self.runs or ():
            yield at, first, last - first
            at += last - first


def local_tensors(
    tensors: Mapping[str, T], slices: Mapping[str, RankSlice] | None, whose: str
) -> dict[str, LocalTensor[T]]:
    """Each tensor with its slice, by name; one without is whole.

    LayoutMismatch where a slice is of no tensor, does not lie in its full shape, or gives another
    shape.
    """
    slices = slices or {}
    for name in slices.keys() - tensors.keys():
        raise LayoutMismatch(
            f"{whose} names a slice of a tensor that it does not have; found '{name}'; give slices"
            " of its tensors alone"
        )
    return {
        name: _local_tensor(name, tensor, slices.get(name), whose)
        for name, tensor in tensors.items()
    }


def layout_of_slices(flat: FlatLayout, slices: Sequence[Mapping[str, RankSlice]]) -> Layout:
    """Of ranks that hold these slices of full tensors, rank by rank; a tensor that has none is
    whole at all of them.

    flat: the local tensors of any of the ranks, for names, dtypes and ties; the layout is the same,
    whichever it is.
    """
    layouts = {}
    for spec in flat.tensors:
        whole: RankSlice = (spec.shape, None, ())
        cuts = [rank_slices.get(spec.name, whole) for rank_slices in slices]
        layouts[spec.name] = TensorLayout(
            name=spec.name,
            shape=tuple(cuts[0][0]),
            dtype=spec.dtype,
            shards=_dealt(cuts),
            into=spec.name,
        )
    return Layout(tensors=layouts, aliases=dict(flat.aliases))


def _dealt(cuts: Sequence[RankSlice]) -> Shards:
    """The boxes of one full tensor, of which each rank holds these ranges."""
    ranks, boxes = [], []
    for rank, (shape, dim, runs) in enumerate(cuts):
        at, length = 0, sum(last - first for first, last in runs)
        for first, last in [(0, 0)] if dim is None else [(a, b) for a, b in runs if b > a]:
            start, stop, local_start, local_shape = (
                [0] * len(shape),
                list(shape),
                [0] * len(shape),
                list(shape),
            )
            if dim is not None:
                start[dim], stop[dim], local_start[dim], local_shape[dim] = first, last, at, length
                at += last - first
            ranks.append(rank)
            boxes.append((start, stop, local_start, local_shape))
    dims = len(cuts[0][0])
    return Shards(
        np.array(ranks, np.int64),
        *(
            np.array([box[part] for box in boxes], np.int64).reshape(len(boxes), dims)
            for part in range(4)
        ),
    )


def _local_tensor(name: str, local: T, slice_: RankSlice | None, whose: str) -> LocalTensor[T]:
    local_shape = tuple(local.shape)
    if slice_ is None:
        return LocalTensor(local, local_shape)
    shape, dim, runs = (
        tuple(slice_[0]),
        slice_[1],
        tuple((first, last) for first, last in slice_[2]),
    )
    expected = list(shape)
    if dim is not None:
        if not 0 <= dim < len(shape) or any(
            not 0 <= first <= last <= shape[dim] for first, last in runs
        ):
            raise LayoutMismatch(
                f"{whose} holds a slice of '{name}' that does not lie in it; found"
                f" {list(map(list, runs))} along dimension {dim} of {list(shape)}; cut it anew"
            )
        expected[dim] = sum(last - first for first, last in runs)
    if list(local_shape) != expected:
        raise LayoutMismatch(
            f"{whose} has another shape for its slice of '{name}'; found {list(local_shape)}, but"
            " ranges"
            f" {list(map(list, runs))} along dimension {dim} of {list(shape)} make {expected}; cut"
            " it anew"
        )
    return LocalTensor(local, shape) if dim is None else LocalTensor(local, shape, dim, runs)
