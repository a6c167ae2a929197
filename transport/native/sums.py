"""The cheap checksum of bytes: by the C kernel, by numpy where there is no compiler, by Triton or
torch on GPUs; at once, or by a thread behind the writer, so that a reader's proof costs its loop
nothing.

With w_0, w_1, .. as the 64-bit little-endian words of the bytes (the last one filled up with
zeros), s1 = sum w_i and s2 = sum (i + 1) w_i, it is s1 + rotl(s2, 32), all modulo 2^64. A changed
bit changes it, and so do misplaced words.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from transport.native.build import library

Ints = Sequence[int] | NDArray[np.int64]
Pairs = NDArray[np.uint64]
CHUNK_WORDS = 1 << 16
"""Words that numpy sums at once: what lies between stays in the cache."""
DEVICE_WORDS = 1 << 24
"""Words that another device sums at once."""


def wordsum(buffer: torch.Tensor) -> int:
    """The checksum of a dense buffer, uint8[n], on any device; in [0, 2^64)."""
    return wordsums(buffer, [0], [buffer.numel()])[0]


def wordsums(buffer: torch.Tensor, offsets: Ints, sizes: Ints) -> list[int]:
    """The checksums of the ranges [offset, offset + size) of a dense buffer, uint8[n], on any
    device.
    """
    checksums: list[int] = folded(pairs(buffer, offsets, sizes)).tolist()
    return checksums


def pairs(buffer: torch.Tensor, offsets: Ints, sizes: Ints) -> Pairs:
    """s1 and s2 of those ranges, uint64[ranges, 2]."""
    begins, lengths = np.asarray(offsets, np.int64), np.asarray(sizes, np.int64)
    sums = np.empty((len(begins), 2), np.uint64)
    kernels = library()
    if buffer.device.type == "cpu" and kernels is not None:
        kernels.dataflow_sums(
            buffer.data_ptr(),
            begins.ctypes.data,
            lengths.ctypes.data,
            len(begins),
            sums.ctypes.data,
        )
        return sums
    parts = [
        buffer[begin : begin + size]
        for begin, size in zip(begins.tolist(), lengths.tolist(), strict=True)
    ]
    if buffer.device.type == "cpu":
        for row, part in zip(sums, parts, strict=True):
            row[:] = _by_numpy(part.numpy())
    elif parts:
        on_device = torch.zeros((len(parts), 2), dtype=torch.int64, device=buffer.device)
        RangeSums(parts).ask(on_device)
        sums[:] = on_host(on_device)
    return sums


class RangeSums:
    """The sums of dense ranges on another device than the processor, as often as asked for; nothing
    waits for it.
    """

    def __init__(self, parts: Sequence[torch.Tensor], rows: Sequence[int] | None = None) -> None:
        """`parts`: uint8[n] each. `rows`: of the sums, one for each part; None: in their order."""
        self._by_torch: list[tuple[int, torch.Tensor]] = []
        boxes: list[tuple[int, ...]] = []
        summed: list[int] = []
        for row, part in zip(range(len(parts)) if rows is None else rows, parts, strict=True):
            if by_triton(part.device) and part.data_ptr() % 8 == 0:
                boxes.append((0, part.data_ptr(), 1, part.numel(), 0, 0, 0))
                summed.append(row)
            else:
                self._by_torch.append((row, part))
        self._words: Any = None
        if boxes:
            from transport.native.triton_words import WordMoves

            self._words = WordMoves(boxes, summed, parts[0].device, copies=False)

    def ask(self, sums: torch.Tensor) -> None:
        """Add s1 and s2 of each part to its row of `sums`, int64[n, 2] on their device."""
        if self._words is not None:
            self._words.ask(sums)
        for row, part in self._by_torch:
            sums[row] += by_torch(part)


def on_host(sums: torch.Tensor) -> Pairs:
    """s1 and s2, int64[n, 2] on any device, as numbers here. Waits for the device."""
    numbers: Pairs = sums.cpu().numpy().view(np.uint64)
    return numbers


@functools.cache
def by_triton(device: torch.device) -> bool:
    """Whether kernels in Triton run on this device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def folded(pairs: Pairs) -> Pairs:
    """The checksum of each row of s1 and s2, uint64[n]."""
    s1, s2 = pairs[:, 0], pairs[:, 1]
    return s1 + (s2 << np.uint64(32) | s2 >> np.uint64(32))


def folded_there(sums: torch.Tensor) -> torch.Tensor:
    """The checksum of each row of s1 and s2, int64[n, 2], on their device: int64[n], the same
    bits.
    """
    s1, s2 = sums.unbind(1)
    return s1 + (s2 << 32 | s2 >> 32 & 0xFFFFFFFF)


def joined(first: Pairs, second: Pairs, words: int) -> Pairs:
    """s1 and s2 of two pieces together, the second behind `words` words; uint64[2] each."""
    return first + second + second[[0, 0]] * np.array([0, words], np.uint64)


def dense_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as uint8[n]: a view of them if they lie dense, a copy if not."""
    dense = tensor.detach().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


@functools.cache
def _places() -> Pairs:
    return np.arange(1, CHUNK_WORDS + 1, dtype=np.uint64)


def _by_numpy(data: NDArray[np.uint8]) -> Pairs:
    whole = len(data) // 8 * 8
    tail = np.zeros(8, np.uint8)
    tail[: len(data) - whole] = data[whole:]
    parts = [
        (at // 8, data[at : min(at + 8 * CHUNK_WORDS, whole)])
        for at in range(0, whole, 8 * CHUNK_WORDS)
    ]
    total = np.zeros(2, np.uint64)
    for before, part in [*parts, (whole // 8, tail)]:
        words = part.view("<u8")
        own = [words.sum(dtype=np.uint64), (words * _places()[: len(words)]).sum(dtype=np.uint64)]
        total = joined(total, np.array(own, np.uint64), before)
    return total


def by_torch(data: torch.Tensor) -> torch.Tensor:
    """s1 and s2 of uint8[n] on its device, int64[2]: sums there wrap as the checksum's do."""
    whole = data.numel() // 8 * 8
    tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
    tail[: data.numel() - whole] = data[whole:]
    body = data[:whole] if data.storage_offset() % 8 == 0 else data[:whole].clone()
    words = body.view(torch.int64) if whole else tail.view(torch.int64)[:0]
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    for at in range(0, words.numel(), DEVICE_WORDS):
        part = words[at : at + DEVICE_WORDS]
        places = torch.arange(at + 1, at + 1 + part.numel(), device=data.device)
        sums += torch.stack([part.sum(), (part * places).sum()])
    last = tail.view(torch.int64)[0]
    return sums + torch.stack([last, last * (whole // 8 + 1)])


# Behind a writer.

RUNNING, SUMMED = range(2)


class _Follow(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("sums", ctypes.c_void_p),
        ("progress", ctypes.c_void_p),
        ("version", ctypes.c_int64),
        ("stop", ctypes.c_int64),
        ("state", ctypes.c_int64),
        ("thread", ctypes.c_uint64),
    )


class Follower:
    """One pass over ranges of a buffer while they are written.

    Consumes: bytes below the writer's watermark. Produces: their sums. Waits for: the watermark.
    Unblocked by: the writer; another version in its place; `close`.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        offsets: Ints,
        sizes: Ints,
        progress: torch.Tensor | None,
        version: int,
    ) -> None:
        """`progress` (int64[2]): the version that is being written, and how many bytes of it are
        whole; None: all.

        RuntimeError where there is no thread to be had.
        """
        kernels = library()
        assert kernels is not None, "whoever follows has asked for the library"
        self._kernels, self._held = kernels, (buffer, progress)
        self._process = os.getpid()
        self._offsets, self._sizes = np.asarray(offsets, np.int64), np.asarray(sizes, np.int64)
        self._sums = np.zeros((len(self._offsets), 2), np.uint64)
        self._job: _Follow | None = _Follow(
            data=buffer.data_ptr(),
            offsets=self._offsets.ctypes.data,
            sizes=self._sizes.ctypes.data,
            count=len(self._offsets),
            sums=self._sums.ctypes.data,
            version=version,
            progress=None if progress is None else progress.data_ptr(),
        )
        if error := kernels.dataflow_follow(ctypes.byref(self._job)):
            self._job = None
            raise RuntimeError(
                f"no thread to verify version {version} with; found {os.strerror(error)}; raise the"
                " limit on processes"
            )

    @property
    def running(self) -> bool:
        """Whether it is still on its way."""
        return self._job is not None and self._job.state == RUNNING

    @property
    def pairs(self) -> Pairs | None:
        """s1 and s2 of each range, uint64[ranges, 2], once all are summed; None before, or for
        good.
        """
        return self._sums if self._job is not None and self._job.state == SUMMED else None

    def close(self) -> None:
        """Stop; returns when the thread is gone, within the time of one chunk. A forked process has
        none.
        """
        if self._job is not None and self._process == os.getpid():
            self._kernels.dataflow_forget(ctypes.byref(self._job))
        self._job = None

    def __del__(self) -> None:
        if hasattr(self, "_job"):
            self.close()
