"""Which part of each full tensor a local one holds: slices, as the layout of their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from transport.weights.layout.flat import FlatLayout
from transport.weights.layout.layout import Layout, Shards, TensorLayout

RankSlice = tuple[Sequence[int], int | None, Sequence[Sequence[int]]]
"""(shape of the full tensor, dimension along which it is cut, ranges [first, last) along it, end to
end in the local tensor); without a dimension: all of it. Lists do as well, as msgpack gives
them."""


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
