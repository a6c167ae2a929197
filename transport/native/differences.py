"""Where two buffers differ, in blocks of 64 bytes and in 16-bit words: by the C kernel, or by numpy
and torch.

A page is 65,536 words, so that a word's place within it is 16 bits.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from transport.native.build import built

BLOCK = 64
"""Bytes."""
PAGE_WORDS = 1 << 16
SLICE_WORDS = 1 << 18
"""Words compared at once: what lies between stays in a processor's cache. Whole pages."""


@dataclass(frozen=True)
class Differences:
    """Of two buffers of n bytes."""

    blocks: torch.Tensor
    """uint8[ceil(n / 512)]: a bit for each whole block, the lowest first."""
    counts: torch.Tensor
    """int32[ceil(n / 131072)]: words of each page that differ."""
    lows: torch.Tensor | None
    """int16[k]: their places within their pages, modulo 2^16, ascending; None when they are more
    than was asked for."""
    values: torch.Tensor | None
    """int16[k]: what the newer buffer has there."""


def differences(old: torch.Tensor, new: torch.Tensor, most_words: int) -> Differences:
    """Where two dense buffers, uint8[n] that begin at multiples of 8 bytes, differ; a last odd byte
    is not looked at.

    Of no more words than `most_words` are places and values taken down.
    """
    kernels = built("delta.c") if old.device.type == new.device.type == "cpu" else None
    return (
        _by_torch(old, new, most_words)
        if kernels is None
        else _by_kernel(kernels, old, new, most_words)
    )


def _by_kernel(
    kernels: ctypes.CDLL, old: torch.Tensor, new: torch.Tensor, most_words: int
) -> Differences:
    words, most = len(new) // 2, max(0, most_words)
    blocks = torch.zeros(-(-len(new) // (8 * BLOCK)), dtype=torch.uint8)
    counts = torch.zeros(-(-words // PAGE_WORDS), dtype=torch.int32)
    lows, values = (torch.empty(min(most, words) + BLOCK // 2, dtype=torch.int16) for _ in range(2))
    kernels.dataflow_differences.argtypes = (
        (ctypes.c_void_p,) * 2 + (ctypes.c_int64,) * 2 + (ctypes.c_void_p,) * 4
    )
    kernels.dataflow_differences.restype = ctypes.c_int64
    buffers = (tensor.data_ptr() for tensor in (blocks, counts, lows, values))
    count = kernels.dataflow_differences(old.data_ptr(), new.data_ptr(), words, most, *buffers)
    fits = count <= most
    return Differences(
        blocks, counts, lows[:count] if fits else None, values[:count] if fits else None
    )


def _by_torch(old: torch.Tensor, new: torch.Tensor, most_words: int) -> Differences:
    bits, words = len(new) // BLOCK, len(new) // 2
    before, after = (buffer[: 2 * words].view(torch.int16) for buffer in (old, new))
    changed = torch.zeros(-(-len(new) // (8 * BLOCK)) * 8, dtype=torch.bool, device=new.device)
    counts = torch.zeros(-(-words // PAGE_WORDS), dtype=torch.int32, device=new.device)
    positions: list[torch.Tensor] | None = [torch.zeros(0, dtype=torch.int64, device=new.device)]
    count = 0
    for low in range(0, words, SLICE_WORDS):
        differs = before[low : low + SLICE_WORDS] != after[low : low + SLICE_WORDS]
        first, last = low * 2 // BLOCK, min(bits, (low + SLICE_WORDS) * 2 // BLOCK)
        whole = differs[: (last - first) * BLOCK // 2].view(torch.int64).view(-1, BLOCK // 16)
        changed[first:last] = (whole != 0).any(1)
        at = low + _true(differs)
        count += len(at)
        if positions is not None:
            positions = [*positions, at] if count <= most_words else None
        pages = torch.bincount((at - low) // PAGE_WORDS, minlength=-(-len(differs) // PAGE_WORDS))
        counts[low // PAGE_WORDS :][: len(pages)] = pages.to(torch.int32)
    packed = (
        changed.view(-1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=new.device)
    ).sum(1, dtype=torch.uint8)
    places = None if positions is None else torch.cat(positions)
    lows = None if places is None else (places % PAGE_WORDS).to(torch.int16)
    return Differences(packed, counts, lows, None if places is None else after[places])


def _true(flags: torch.Tensor) -> torch.Tensor:
    """int64: the indices of true elements; numpy is faster on a CPU."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    return flags.nonzero().view(-1)
