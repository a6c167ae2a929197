"""Tensors in a flat buffer: views of it, filling it, and the checksums of its content."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from math import prod

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from transport.native import Copier, wordsums
from transport.native.sums import folded, joined, pairs
from transport.weights.layout.flat import ITEM_BYTES, FlatLayout
from transport.weights.memory.ports import WriterSegment


def views(layout: FlatLayout, buffer: torch.Tensor) -> list[torch.Tensor]:
    """The layout's tensors, in its order, as views of `buffer` (uint8[layout.nbytes])."""
    typed = {
        dtype: buffer.view(getattr(torch, dtype))
        for dtype in {spec.dtype for spec in layout.tensors}
    }
    return [
        typed[spec.dtype]
        .narrow(0, spec.offset // ITEM_BYTES[spec.dtype], prod(spec.shape))
        .view(spec.shape)
        for spec in layout.tensors
    ]


def copy(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its destination, casting where dtypes differ; strides and devices may
    be any.
    """
    with torch.no_grad():
        torch._foreach_copy_([t.detach() for t in destinations], [t.detach() for t in sources])


def filler(layout: FlatLayout, segment: WriterSegment, threads: int) -> Copier:
    """What fills a segment, sums what it writes, and raises the segment's watermark."""
    return Copier(
        views(layout, segment.buffer),
        threads=threads,
        base=segment.buffer,
        progress=segment.progress,
    )


def fill(filler: Copier, sources: Sequence[torch.Tensor]) -> bytes:
    """Write a version's tensors into its sealed segment; their cheap checksums, packed."""
    return packed(filler.run(sources))


def packed(numbers: Sequence[int] | NDArray[np.uint64]) -> bytes:
    """Integers of 64 bits, as an Offer carries them."""
    return np.asarray(numbers, "<u8").tobytes()


def ranges(layout: FlatLayout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First byte and size of each tensor of the layout."""
    places = np.array([(spec.offset, spec.nbytes) for spec in layout.tensors], np.int64)
    return places[:, 0].copy(), places[:, 1].copy()


def summed(
    layout: FlatLayout, buffer: torch.Tensor, slice_bytes: int | None
) -> Generator[None, None, bytes]:
    """Returns the cheap checksum of each tensor in the buffer, packed; on the buffer's device.

    Yields after about `slice_bytes` of reading, once per slice; never if it is None.
    """
    if slice_bytes is None:
        return packed(wordsums(buffer, *ranges(layout)))
    sums = np.zeros((len(layout.tensors), 2), np.uint64)
    for index, at, part in _slices(layout, buffer, slice_bytes):
        if part is None:
            yield
        else:
            sums[index] = joined(sums[index], pairs(part, [0], [part.numel()])[0], at // 8)
    return packed(folded(sums))


def digested(
    layout: FlatLayout, buffer: torch.Tensor, slice_bytes: int | None
) -> Generator[None, None, bytes]:
    """Returns xxh3_64 of each tensor in the buffer, packed; yields as `summed` does."""
    digests = [xxhash.xxh3_64() for _ in layout.tensors]
    for index, _, part in _slices(layout, buffer, slice_bytes):
        if part is None:
            yield
        else:
            digests[index].update(part.cpu().numpy().data)
    return packed([digest.intdigest() for digest in digests])


def whole(steps: Generator[None, None, bytes]) -> bytes:
    """What the steps return."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bytes(end.value)


def difference(layout: FlatLayout, actual: bytes, published: bytes) -> str | None:
    """The tensor whose sum is another than published; None if there is none."""
    if actual == published:
        return None
    for index, spec in enumerate(layout.tensors):
        if actual[8 * index : 8 * index + 8] != published[8 * index : 8 * index + 8]:
            return f"tensor '{spec.name}'"
    return "the list of sums"


def _slices(
    layout: FlatLayout, buffer: torch.Tensor, slice_bytes: int | None
) -> Iterator[tuple[int, int, torch.Tensor | None]]:
    """(tensor, first byte in it, its bytes from there), in slices; None for the bytes: enough for
    now.
    """
    step, read = -(-(slice_bytes or buffer.numel()) // 8) * 8, 0
    for index, spec in enumerate(layout.tensors):
        for at in range(0, spec.nbytes, step):
            if read >= step:
                yield index, at, None
                read = 0
            size = min(step, spec.nbytes - at)
            yield index, at, buffer[spec.offset + at : spec.offset + at + size]
            read += size


@contextmanager
def copying(threads: int) -> Iterator[None]:
    """Run torch's copies on that many threads, so that they take no core from the other workers."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
