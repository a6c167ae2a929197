"""Sums many tensors in place, with any strides: no Python per tensor once it is compiled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from transport.native.boxes import Box, box
from transport.native.build import library
from transport.native.sums import dense_bytes, folded, pairs


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
