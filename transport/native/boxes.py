"""Which copies the C kernel can do: rows of bytes at even distances, as they are or cast from
float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

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
