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
from transport.native.sums import (
    RangeSums,
    by_torch,
    by_triton,
    dense_bytes,
    folded,
    on_host,
    pairs,
)

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
    """The copy of source into destination, of one shape, both on the CPU or on one GPU; None where
    torch has to do it.
    """
    cast = 0 if destination.dtype == source.dtype else CASTS.get(destination.dtype)
    if (
        cast is None
        or (cast and source.dtype != torch.float32)
        or destination.shape != source.shape
        or destination.device != source.device
    ):
        return None
    on_gpu = by_triton(destination.device)
    if any(
        not (tensor.device.type == "cpu" or on_gpu) or tensor.is_conj() or tensor.is_neg()
        for tensor in (destination, source)
    ):
        return None
    size, from_size = destination.element_size(), source.element_size()
    axes = merged(destination.shape, destination.stride(), source.stride())
    if not axes:
        axes = [(1, 1, 1)]
    if len(axes) == 1 and axes[0][1:] == (1, 1):
        axes = [(1, 0, 0), *axes]
    if len(axes) != 2 or axes[1][1:] != (1, 1):
        return None
    (rows, to_stride, from_stride), (items, _, _) = axes
    words = Box(
        destination.data_ptr(),
        source.data_ptr(),
        rows,
        items * size,
        to_stride * size,
        from_stride * from_size,
        cast,
    )
    if on_gpu:
        # words of 8 bytes, of which a cast reads 16
        written, read = (words.to, words.row, words.to_stride), (words.source, words.from_stride)
        word_bytes = 16 if cast else 8
        is_odd = any(n % 8 for n in written) or any(n % word_bytes for n in read)
        return None if is_odd else words
    return None if rows > 1 and words.row < SHORTEST_ROW else words


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
    are done by the C kernel without the GIL, past the caches where there is much to copy, and
    within a GPU by one launch for all; everything else by torch.
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
        self._device = self._destinations[0].device if destinations else torch.device("cpu")
        self._known: list[tuple[Any, ...]] = []
        self._groups: list[tuple[bool, int, int]] = []
        self._words: Any = None
        self._table = np.empty((0, len(Box._fields)), np.int64)
        if self._sources is not None:
            self._compile(self._sources)

    def run(self, sources: Sequence[torch.Tensor] | None = None) -> list[int]:
        """`start`, and wait: the checksum (`wordsum`) of each destination's bytes, densely laid
        out, in order.
        """
        checksums: list[int] = folded(on_host(self.start(sources))).tolist()
        return checksums

    def start(
        self, sources: Sequence[torch.Tensor] | None = None, sums: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Copy all, on a GPU without waiting for it; s1 and s2 of each destination's bytes,
        int64[n, 2], where the destinations are. `sums`: zeros that they are added to.

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
        if sums is None:
            sums = torch.zeros((len(sources), 2), dtype=torch.int64, device=self._device)
        if self._words is not None:
            self._words.ask(sums)
        for is_odd, first, end in self._groups:
            if is_odd:
                self._copy_by_torch(sources, first, end, sums)
            self._copy(end if is_odd else first, end, sums)
        return sums

    def _compile(self, sources: Sequence[torch.Tensor]) -> None:
        both = list(zip(self._destinations, sources, strict=True))
        on_gpu = by_triton(self._device)
        boxes = [box(*pair) if on_gpu or library() else None for pair in both]
        self._table = np.array([box or NOTHING for box in boxes], np.int64).reshape(
            len(boxes), len(Box._fields)
        )
        self._words = None
        if on_gpu and any(boxes):
            from transport.native.triton_words import WordMoves

            at = [row for row, box in enumerate(boxes) if box]
            self._words = WordMoves(self._table[at], at, self._device, copies=True)
        self._groups, begin = [], 0
        for is_odd, run in groupby(box is None for box in boxes):
            end = begin + len(list(run))
            if is_odd or not on_gpu:
                self._groups.append((is_odd, begin, end))
            begin = end

    def _copy(self, first: int, end: int, sums: torch.Tensor) -> None:
        """Destinations [first, end) by the kernel; the watermark stands behind them afterwards."""
        kernels, base = library(), self._base
        if kernels is None or self._device.type != "cpu":
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
            sums[first:end].data_ptr(),
            base.data_ptr() if mark and base is not None else None,
            mark or None,
            behind,
            self._threads,
        )

    def _copy_by_torch(
        self, sources: Sequence[torch.Tensor], first: int, end: int, sums: torch.Tensor
    ) -> None:
        destinations = self._destinations[first:end]
        with torch.no_grad():
            torch._foreach_copy_(destinations, [source.detach() for source in sources[first:end]])
        for row, destination in enumerate(destinations, first):
            data = dense_bytes(destination)
            if self._device.type == "cpu":
                sums[row] += torch.from_numpy(pairs(data, [0], [data.numel()]).view(np.int64))[0]
            else:
                sums[row] += by_torch(data)


class Summer:
    """The checksum (`wordsum`) of each tensor's bytes, as if they were laid out densely.

    Rows of bytes are read by the C kernel without the GIL; everything else is laid out by torch. On
    a GPU one launch sums all that lies dense.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """They are held; `run` sums what they hold then."""
        self._tensors = [tensor.detach() for tensor in tensors]
        self._device = self._tensors[0].device if tensors else torch.device("cpu")
        on_cpu = self._device.type == "cpu"
        boxes = [box(t, t) if on_cpu and library() else None for t in self._tensors]
        self._read = [at for at, box in enumerate(boxes) if box]
        dense = [at for at, t in enumerate(self._tensors) if not on_cpu and t.is_contiguous()]
        self._dense = RangeSums([dense_bytes(self._tensors[at]) for at in dense], dense)
        self._laid = sorted(set(range(len(boxes))) - set(self._read) - set(dense))
        rows = [box._replace(to=0, to_stride=0) for box in boxes if box]
        self._table = np.array(rows, np.int64).reshape(len(rows), len(Box._fields))

    def run(self) -> list[int]:
        """Of all, in order. Waits for the device."""
        checksums: list[int] = folded(on_host(self.start())).tolist()
        return checksums

    def start(self, sums: torch.Tensor | None = None) -> torch.Tensor:
        """s1 and s2 of each tensor's bytes, int64[n, 2], where the tensors are; on a GPU nothing
        waits for them. `sums`: zeros that they are added to.
        """
        if sums is None:
            sums = torch.zeros((len(self._tensors), 2), dtype=torch.int64, device=self._device)
        kernels = library()
        if kernels and self._read:
            read = sums if len(self._read) == len(sums) else torch.zeros_like(sums[self._read])
            kernels.dataflow_copy(
                self._table.ctypes.data, len(read), read.data_ptr(), None, None, 0, 1
            )
            if read is not sums:
                sums[self._read] = read
        self._dense.ask(sums)
        for at in self._laid:
            data = dense_bytes(self._tensors[at])
            if self._device.type == "cpu":
                sums[at] += torch.from_numpy(pairs(data, [0], [data.numel()]).view(np.int64))[0]
            else:
                sums[at] += by_torch(data)
        return sums
