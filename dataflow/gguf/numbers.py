"""A GGUF file's numbers as floats: what gguf turns back, some rows at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from dataflow.gguf.content import GGUFContent, kinds_of_numbers

AT_ONCE_BYTES = 32 << 20
"""The most floats that are made at once."""
_AS_THEY_ARE = ("F32", "F16", "BF16")
"""Kinds of numbers that safetensors has too."""


def stored_as(kind: str) -> str:
    """How a folder holds numbers of this kind: as they are where it can, else as float32, which is
    what they mean.
    """
    return kind if kind in _AS_THEY_ARE else "F32"


@functools.cache
def is_read(kind: str) -> bool:
    """Whether the installed gguf turns numbers of this kind back."""
    import gguf

    size = next(size for name, _, size in kinds_of_numbers().values() if name == kind)
    try:
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        return False
    return True


def dequantized(content: GGUFContent, name: str) -> Any:
    """A small tensor, float32."""
    shape = content.tensors[name].shape
    return np.concatenate(list(rows_of(content, name))).reshape(shape)


def rows_of(content: GGUFContent, name: str, *, heads: int = 0) -> Iterator[Any]:
    """A tensor, float32 [rows, columns], some rows after the other; one of one dimension as one
    row.

    heads: above 0, its rows are those of so many heads, in each the two of a rotated pair side by
    side: first all first ones come, then all second ones, as transformers has them.
    """
    import gguf

    tensor = content.tensors[name]
    rows = math.prod(tensor.shape[:-1])
    stored = np.memmap(
        content.path, np.uint8, "r", tensor.begin, (rows, tensor.nbytes // max(1, rows))
    )
    order = np.arange(rows)
    if heads:
        order = order.reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
    step = max(1, AT_ONCE_BYTES // (4 * tensor.shape[-1]))
    for first in range(0, rows, step):
        chosen = np.asarray(stored[order[first : first + step]])
        yield gguf.quants.dequantize(chosen, gguf.GGMLQuantizationType[tensor.kind])
