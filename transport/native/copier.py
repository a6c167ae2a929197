"""Copies many tensors into others in one call, and sums what it writes: no Python per tensor once
it is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from transport.native.boxes import Box, box
from transport.native.build import library
from transport.native.sums import by_triton, dense_bytes, folded, pairs

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
