"""Copies of boxes as runs of bytes between two flat buffers, neighbours merged: what a one-sided put needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import numpy as np

from transport.weights.errors import LayoutMismatch
from transport.weights.flat import ITEM_BYTES, FlatLayout
from transport.weights.plan import Box, Copy
from transport.weights.shards import Ints


@dataclass(frozen=True, eq=False)
class Runs:
    """Ranges of bytes, in the order of the destination; no two could be one."""

    source: Ints
    """[r]: first byte in the source's buffer."""
    destination: Ints
    """[r]: first byte in the destination's."""
    nbytes: Ints
    """[r]"""


def runs(copies: Iterable[Copy], source: FlatLayout, destination: FlatLayout) -> Runs:
    """The copies of one pair of ranks as byte ranges of their buffers.

    Ranges that touch on both sides are one, over the borders of boxes, of fused parts and of tensors. LayoutMismatch
    where a copy casts, since no range of bytes would do that: cast before."""
    there = {spec.name: spec for spec in source.tensors}
    here = {spec.name: spec for spec in destination.tensors}
    pieces: list[tuple[Ints, Ints, int]] = []
    for copy in copies:
        tail, head = there[copy.source_name], here[copy.destination_name]
        if tail.dtype != head.dtype:
            raise LayoutMismatch(
                f"a copy of bytes cannot cast; found '{copy.tensor}' as {tail.dtype} at the source and {head.dtype} at "
                "the destination; cast the source's layout first, with Layout.cast"
            )
        item = ITEM_BYTES[tail.dtype]
        size = prod(copy.shape)
        length = min(_whole(copy.source_box, tail.shape), _whole(copy.destination_box, head.shape), size)
        first, to = _starts(copy.source_box, tail.shape, length), _starts(copy.destination_box, head.shape, length)
        pieces.append((tail.offset + first * item, head.offset + to * item, length * item))
    return _merged(pieces)


def _whole(box: Box, shape: tuple[int, ...]) -> int:
    """Elements of the box that follow each other in memory, from its first on."""
    length = 1
    for each, size in zip(reversed(box), reversed(shape), strict=True):
        length *= each.stop - each.start
        if each.stop - each.start < size:
            break
    return length


def _starts(box: Box, shape: tuple[int, ...], length: int) -> Ints:
    """Where in the local tensor every `length`-th element of the box lies, in elements.

    The box's elements in their order make up the runs, each `length` long."""
    if not box:
        return np.zeros(1, np.int64)
    sizes = tuple(each.stop - each.start for each in box)
    index = np.unravel_index(np.arange(0, prod(sizes), length), sizes)
    at = [along + each.start for along, each in zip(index, box, strict=True)]
    return np.asarray(np.ravel_multi_index(at, shape))


def _merged(pieces: list[tuple[Ints, Ints, int]]) -> Runs:
    if not pieces:
        none = np.zeros(0, np.int64)
        return Runs(none, none, none)
    source, destination = (np.concatenate([piece[side] for piece in pieces]) for side in (0, 1))
    nbytes = np.concatenate([np.full(len(piece[0]), piece[2]) for piece in pieces])
    order = np.argsort(destination, kind="stable")
    source, destination, nbytes = source[order], destination[order], nbytes[order]
    new = np.ones(len(order), bool)
    new[1:] = (source[1:] != source[:-1] + nbytes[:-1]) | (destination[1:] != destination[:-1] + nbytes[:-1])
    first = np.flatnonzero(new)
    return Runs(source[first], destination[first], np.add.reduceat(nbytes, first))
