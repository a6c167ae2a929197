"""Named tensors in one block of memory that two processes map, and the handles of tensors on a GPU.

The block has no name: it is an open file that the child inherits, so nothing is left behind when
both are gone. The file imports nothing of this project: vLLM's environment reads it too.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

ALIGNED = 64
"""Bytes at whose multiples tensors begin."""

Layout = dict[str, list[Any]]
"""By name: dtype, shape, first byte."""


def lay_out(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> tuple[Layout, int]:
    """Where each tensor stands in the block, and how many bytes the block has."""
    layout: Layout = {}
    at = 0
    for name, shape in shapes.items():
        layout[name] = [dtype, list(shape), at]
        at += -(-math.prod(shape) * getattr(torch, dtype).itemsize // ALIGNED) * ALIGNED
    return layout, max(at, ALIGNED)


def reserve(size: int) -> int:
    """An open file of `size` bytes in memory, without a name; the caller closes it."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("weights")
    else:
        with tempfile.TemporaryFile() as opened:
            file = os.dup(opened.fileno())
    os.truncate(file, size)
    return file


def attach(file: int, layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors of an open file, by name; writing into them writes into the file's memory."""
    memory = mmap.mmap(file, os.fstat(file).st_size)
    tensors = {}
    for name, (dtype, shape, at) in layout.items():
        kind = getattr(torch, dtype)
        tensors[name] = torch.frombuffer(
            memory, dtype=kind, count=math.prod(shape), offset=at
        ).view(shape)
    return tensors


def pack_handle(handle: tuple[Any, ...]) -> list[Any]:
    """The handle of a CUDA tensor (`torch.multiprocessing.reductions.reduce_tensor`) as plain
    values.
    """
    _, size, stride, offset, _, dtype, *handle_fields = handle
    return [list(size), list(stride), offset, str(dtype).removeprefix("torch."), *handle_fields]


def unpack_handle(packed: list[Any]) -> tuple[Any, ...]:
    """The arguments of `rebuild_cuda_tensor` that `pack_handle` packed."""
    size, stride, offset, dtype, *handle_fields = packed
    kind = getattr(torch, dtype)
    return (
        torch.Tensor,
        torch.Size(size),
        tuple(stride),
        offset,
        torch.storage.TypedStorage,
        kind,
        *handle_fields,
    )
