"""What the ranks of an epoch send each other, in which order, cut into chunks: values, the same at
both ends, no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from transport.weights.errors import LayoutMismatch, ReaderMismatch
from transport.weights.layout.flat import ALIGNMENT, ITEM_BYTES
from transport.weights.layout.layout import Layout
from transport.weights.layout.plan import Box, Copy, CopyPlan, JointPlan
from transport.weights.layout.reshard import reshard
from transport.weights.protocol.messages import FormGroup


@dataclass(frozen=True)
class Fragment:
    """A box of one tensor at a place in a message."""

    copy: Copy
    source: Box
    destination: Box
    offset: int
    """In the message, a multiple of `ALIGNMENT`."""
    nbytes: int
    """On the way."""


@dataclass(frozen=True)
class Chunk:
    """One message: some fragments of one pair of ranks."""

    fragments: tuple[Fragment, ...]
    nbytes: int


ByPeer = dict[int, tuple[Chunk, ...]]
"""By the peer's rank in the process group, round by round."""
PlaceKey = tuple[str, tuple[int, ...]]
"""A box of a local tensor: its name and `place`."""


def place(box: Box) -> tuple[int, ...]:
    """A box as integers."""
    return tuple(mark for span in box for mark in (span.start, span.stop))


def joint_plan(form: FormGroup) -> JointPlan:
    """Of an epoch. ReaderMismatch names a reader whose layout does not fit the trainer's."""
    trainer, *layouts = map(Layout.from_plain, form.layouts)
    plans = []
    for reader in form.readers:
        try:
            plans.append(reshard(trainer, layouts[reader.layout - 1]))
        except LayoutMismatch as error:
            raise ReaderMismatch(reader.name, str(error)) from error
    return JointPlan(tuple(plans), tuple(reader.ranks for reader in form.readers))


def chunks_from(plan: JointPlan, form: FormGroup, source_rank: int) -> ByPeer:
    """What this rank of the trainer sends in an epoch."""
    return {
        form.sources + to: chunks_between(at, source_rank, rank, form.bucket_bytes)
        for to in plan.receivers(source_rank)
        for at, rank in [plan.at(to)]
    }


def chunks_to(plan: JointPlan, form: FormGroup, reader: str, rank: int) -> ByPeer:
    """What this rank of a reader receives in an epoch."""
    to = form.columns[reader][rank]
    at, _ = plan.at(to)
    return {of: chunks_between(at, of, rank, form.bucket_bytes) for of in plan.senders(to)}


@functools.lru_cache(maxsize=1024)
def chunks_between(
    plan: CopyPlan, source_rank: int, destination_rank: int, bucket_bytes: int
) -> tuple[Chunk, ...]:
    """The messages from one rank to another, of at most `bucket_bytes` unless one row is larger.

    They follow the destination's memory, so that tensors side by side there go together.
    """
    places = {name: at for at, name in enumerate(plan.destination.local(destination_rank))}
    copies = sorted(
        plan.copies(source_rank=source_rank, destination_rank=destination_rank),
        key=lambda copy: (
            places[copy.destination_name],
            [span.start for span in copy.destination_box],
        ),
    )
    chunks: list[Chunk] = []
    fragments: list[Fragment] = []
    end = 0
    for copy in copies:
        for source, destination, nbytes in _split(copy, bucket_bytes):
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            if fragments and offset + nbytes > bucket_bytes:
                chunks.append(Chunk(tuple(fragments), end))
                fragments, offset = [], 0
            fragments.append(Fragment(copy, source, destination, offset, nbytes))
            end = offset + nbytes
    if fragments:
        chunks.append(Chunk(tuple(fragments), end))
    return tuple(chunks)


def split_shape(shape: tuple[int, ...], item_bytes: int, most: int) -> list[Box]:
    """Boxes of at most `most` bytes that make up a tensor, cut along its first dimension longer
    than 1.
    """
    whole = tuple(slice(0, length) for length in shape)
    if prod(shape) * item_bytes <= most:
        return [whole]
    dim = next((at for at, length in enumerate(shape) if length > 1), 0)
    step = max(1, most // (prod(shape[dim + 1 :]) * item_bytes))
    marks = [*range(0, shape[dim], step), shape[dim]]
    return [(*whole[:dim], slice(low, high), *whole[dim + 1 :]) for low, high in pairwise(marks)]


def _split(copy: Copy, most: int) -> Iterator[tuple[Box, Box, int]]:
    """The copy's boxes at both ends and their bytes, in parts of at most `most` bytes."""
    item = ITEM_BYTES[copy.dtype]
    for part in split_shape(copy.shape, item, most):
        nbytes = prod(span.stop - span.start for span in part) * item
        yield _within(copy.source_box, part), _within(copy.destination_box, part), nbytes


def _within(box: Box, part: Box) -> Box:
    """A part of a box; the one that has more dimensions has size 1 along its leading ones."""
    lead = max(0, len(box) - len(part))
    inner = part[len(part) - len(box) + lead :]
    moved = (
        slice(b.start + p.start, b.start + p.stop) for b, p in zip(box[lead:], inner, strict=True)
    )
    return (*box[:lead], *moved)
