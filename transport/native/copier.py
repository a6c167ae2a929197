"""Copies many tensors into others in one call, and sums what it writes, or sums many in place: no
Python per tensor once it is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from transport.native.build import library
from transport.native.sums import by_triton, dense_bytes, folded, pairs

# Which copies the C kernel can do: rows of bytes at even distances, as they are or cast from
# float32.

CASTS = {torch.bfloat16: 1, torch.float16: 2}
"""What float32 may become on the way, by the kernel's names."""
SHORTEST_ROW = 64
"""Bytes; shorter rows are faster by torch."""


class Box(NamedTuple):
    """One copy as the kernel takes it: `rows` rows of `row` bytes at the destination, distances in
    bytes.
    """

    to: int
    source: int
    rows: int
    row: int
    to_stride: int
    from_stride: int
    cast: int


def box(destination: torch.Tensor, source: torch.Tensor) -> Box | None:
    """The copy of source into destination, of one shape, both on the CPU; None where torch has to
    do it.
    """
    cast = 0 if destination.dtype == source.dtype else CASTS.get(destination.dtype)
    if (
        cast is None
        or (cast and source.dtype != torch.float32)
        or destination.shape != source.shape
    ):
        return None
    if any(
        tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg()
        for tensor in (destination, source)
    ):
        return None
    size, from_size = destination.element_size(), source.element_size()
    axes = merged(destination.shape, destination.stride(), source.stride())
    if not axes:
        axes = [(1, 1, 1)]
    if len(axes) == 1 and axes[0][1:] == (1, 1):
        axes = [(1, 0, 0), *axes]
    if (
        len(axes) != 2
        or axes[1][1:] != (1, 1)
        or (axes[0][0] > 1 and axes[1][0] * size < SHORTEST_ROW)
    ):
        return None
    (rows, to_stride, from_stride), (items, _, _) = axes
    return Box(
        destination.data_ptr(),
        source.data_ptr(),
        rows,
        items * size,
        to_stride * size,
        from_stride * from_size,
        cast,
    )


def merged(
    shape: tuple[int, ...], to_strides: tuple[int, ...], from_strides: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    """(length, stride there, stride here) of the fewest axes that mean the same, outermost
    first.
    """
    axes: list[tuple[int, int, int]] = []
    for length, to_stride, from_stride in zip(shape, to_strides, from_strides, strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1] == length * to_stride and axes[-1][2] == length * from_stride:
            axes[-1] = (axes[-1][0] * length, to_stride, from_stride)
        else:
            axes.append((length, to_stride, from_stride))
    return axes


NOTHING = Box(0, 0, 0, 0, 0, 0, 0)


class Copier:
    """Copies sources into destinations of the same shapes: strides may be any, dtypes are cast,
    devices may differ.

    Dense runs of bytes, and casts from float32 to bfloat16 or float16 (to nearest, ties to even),
    are done by the C kernel without the GIL, past the caches where there is much to copy; dense
    words of one dtype within a GPU by one launch that sums them too; everything else by torch.
    """

    def __init__(
        self,
        destinations: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor] | None = None,
        *,
        threads: int = 1,
        base: torch.Tensor | None = None,
        progress: torch.Tensor | None = None,
    ) -> None:
        """`sources`: held, and compiled now; without them each `run` names its own. `threads`: of
        the kernel.

        `progress`: its second element (int64[2]) tells, while they are written, how many bytes from
        the start of `base` are whole; the destinations lie dense in `base` then, in ascending
        order, none overlapping.
        """
        self._destinations = [tensor.detach() for tensor in destinations]
        self._threads, self._base, self._progress = threads, base, progress
        self._sources = None if sources is None else [tensor.detach() for tensor in sources]
        self._known: list[tuple[Any, ...]] = []
        self._groups: list[tuple[str, int, int]] = []
        self._table = np.empty((0, len(Box._fields)), np.int64)
        self._sums = np.zeros((len(self._destinations), 2), np.uint64)
        if self._sources is not None:
            self._compile(self._sources)

    def run(self, sources: Sequence[torch.Tensor] | None = None) -> list[int]:
        """Copy all; the checksum (`wordsum`) of each destination's bytes, densely laid out, in
        order.

        `sources` that lie elsewhere than those of the last run are compiled first; they are not
        held.
        """
        if sources is None:
            sources = self._sources
        else:
            where = [(t.data_ptr(), t.stride(), t.shape, t.dtype) for t in sources]
            if where != self._known:
                self._compile(sources)
                self._known = where
        assert sources is not None, "a Copier without sources is told them at each run"
        self._sums.fill(0)
        for kind, first, end in self._groups:
            if kind == "words":
                self._copy_words(sources, first, end)
            elif kind == "torch":
                self._copy_by_torch(sources, first, end)
            self._copy(first if kind == "boxes" else end, end)
        sums: list[int] = folded(self._sums).tolist()
        return sums

    def _compile(self, sources: Sequence[torch.Tensor]) -> None:
        both = list(zip(self._destinations, sources, strict=True))
        boxes = [box(destination, source) if library() else None for destination, source in both]
        self._table = np.array([box or NOTHING for box in boxes], np.int64).reshape(
            len(boxes), len(Box._fields)
        )
        self._groups, at = [], 0
        words = [
            box is None and _dense_words(destination, source)
            for box, (destination, source) in zip(boxes, both, strict=True)
        ]
        kinds = [
            "boxes" if box else "words" if word else "torch"
            for box, word in zip(boxes, words, strict=True)
        ]
        for kind, run in groupby(kinds):
            length = len(list(run))
            self._groups.append((kind, at, at + length))
            at += length

    def _copy(self, first: int, end: int) -> None:
        """Destinations [first, end) by the kernel; the watermark stands behind them afterwards."""
        kernels, base = library(), self._base
        if kernels is None:
            return
        mark = behind = 0
        if self._progress is not None and base is not None:
            mark = self._progress.data_ptr() + self._progress.element_size()
            behind = base.numel()
            if end < len(self._destinations):
                behind = self._destinations[end].data_ptr() - base.data_ptr()
        kernels.dataflow_copy(
            self._table[first:end].ctypes.data,
            end - first,
            self._sums[first:end].ctypes.data,
            base.data_ptr() if mark and base is not None else None,
            mark or None,
            behind,
            self._threads,
        )

    def _copy_by_torch(self, sources: Sequence[torch.Tensor], first: int, end: int) -> None:
        destinations = self._destinations[first:end]
        with torch.no_grad():
            torch._foreach_copy_(destinations, [source.detach() for source in sources[first:end]])
        if self._base is not None:
            offsets = [
                destination.data_ptr() - self._base.data_ptr() for destination in destinations
            ]
            self._sums[first:end] = pairs(
                self._base, offsets, [destination.nbytes for destination in destinations]
            )
            return
        for index, destination in enumerate(destinations, first):
            data = dense_bytes(destination)
            self._sums[index] = pairs(data, [0], [data.numel()])[0]

    def _copy_words(self, sources: Sequence[torch.Tensor], first: int, end: int) -> None:
        from transport.native.triton_words import word_plan

        destinations = self._destinations[first:end]
        plan = word_plan(tuple(tensor.nbytes for tensor in destinations), destinations[0].device)
        addresses = [
            [tensor.data_ptr() for tensor in tensors]
            for tensors in (destinations, sources[first:end])
        ]
        self._sums[first:end] = plan.copy(*addresses)


def _dense_words(destination: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether both lie dense on one GPU, in whole words of one dtype."""
    return (
        by_triton(destination.device)
        and (destination.device, destination.dtype) == (source.device, source.dtype)
        and destination.is_contiguous()
        and source.is_contiguous()
        and not any(
            number % 8 for number in (destination.nbytes, destination.data_ptr(), source.data_ptr())
        )
    )


class Summer:
    """The checksum (`wordsum`) of each tensor's bytes, as if they were laid out densely.

    Rows of bytes are read by the C kernel without the GIL; everything else is laid out by torch.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """They are held; `run` sums what they hold then."""
        self._tensors = [tensor.detach() for tensor in tensors]
        boxes = [box(tensor, tensor) if library() else None for tensor in self._tensors]
        self._read = [at for at, box in enumerate(boxes) if box]
        self._laid = [at for at, box in enumerate(boxes) if not box]
        rows = [box._replace(to=0, to_stride=0) for box in boxes if box]
        self._table = np.array(rows, np.int64).reshape(len(rows), len(Box._fields))

    def run(self) -> list[int]:
        """Of all, in order."""
        sums = np.zeros((len(self._tensors), 2), np.uint64)
        if kernels := library():
            read = np.zeros((len(self._read), 2), np.uint64)
            kernels.dataflow_copy(
                self._table.ctypes.data, len(read), read.ctypes.data, None, None, 0, 1
            )
            sums[self._read] = read
        for at in self._laid:
            data = dense_bytes(self._tensors[at])
            sums[at] = pairs(data, [0], [data.numel()])[0]
        checksums: list[int] = folded(sums).tolist()
        return checksums
