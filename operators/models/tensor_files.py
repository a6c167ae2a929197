"""Safetensors files as places of bytes: parts of tensors read into memory, and written from it,
with nothing mapped.

A mapped file counts as memory of each process that reads it, and a saved dict of tensors is a copy
of all of them: here at most `BUFFER_BYTES` lie between a file and a tensor.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BUFFER_BYTES = 8 << 20
"""Read or written at once, where a tensor's memory cannot be the file's own bytes."""
LONG_RUN_BYTES = 64 << 10
"""From here on a run of neighbouring bytes is read by itself; shorter ones with what lies between
them."""
_LENGTH = struct.Struct("<Q")
_ALIGN = 8
_MOST_HEADER = 100 << 20
_CODES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: code for code, dtype in _CODES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: row-major, from one byte on."""

    path: Path
    begin: int
    """First byte, in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileContent:
    """A file's header."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def content_of(path: Path) -> FileContent:
    """The header of a file. Raises ValueError where it is none, or claims more than the file holds;
    OSError.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else size
        if length > min(_MOST_HEADER, size - _LENGTH.size):
            raise ValueError(
                f"{path} is cut off or no safetensors file: {size} bytes, header of {length}"
            )
        header: dict[str, Any] = json.loads(file.read(length))
    first, metadata = _LENGTH.size + length, header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _CODES:
            raise ValueError(
                f"{path} has '{name}' of type {entry['dtype']}, which is not known here"
            )
        low, high = entry["data_offsets"]
        tensors[name] = StoredTensor(
            path, first + low, _CODES[entry["dtype"]], tuple(entry["shape"])
        )
        if tensors[name].nbytes != high - low or first + high > size:
            raise ValueError(
                f"{path} is cut off or broken: '{name}' takes bytes {low} to {high} of"
                f" {size - first}"
            )
    return FileContent(tensors, metadata)


def laid_out(
    path: Path,
    tensors: Mapping[str, tuple[Sequence[int], torch.dtype]],
    metadata: Mapping[str, str],
) -> tuple[bytes, int, dict[str, StoredTensor]]:
    """The header of a file for tensors of these shapes, its size in bytes, and where each tensor
    goes.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    places, at = {}, 0
    for name, (shape, dtype) in sorted(
        tensors.items(), key=lambda item: (-item[1][1].itemsize, item[0])
    ):
        size = math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + size],
        }
        places[name], at = (at, dtype, tuple(shape)), at + size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    first = _LENGTH.size + len(text)
    stored = {
        name: StoredTensor(path, first + low, dtype, shape)
        for name, (low, dtype, shape) in places.items()
    }
    return _LENGTH.pack(len(text)) + text, first + at, stored


@torch.no_grad()
def read_part(file: int, stored: StoredTensor, offsets: Sequence[int], into: Tensor) -> None:
    """Fill `into`, of any device, strides and dtype, with the part of that shape which begins at
    `offsets`.

    file: a descriptor of `stored.path`. Raises OSError, and EOFError where the file ends before the
    part.
    """
    if not into.numel():
        return
    place = _Place.of(stored, offsets, into.shape)
    if (
        place.is_one_run
        and into.device.type == "cpu"
        and into.is_contiguous()
        and into.dtype == stored.dtype
    ):
        _read(file, _bytes(into), place.begin)
        return
    buffer = torch.empty(0, dtype=torch.uint8)
    for block, begin in place.blocks(into.view(place.sizes), with_gaps=True):
        span = ((len(block) - 1) * place.stride + place.run) * stored.dtype.itemsize
        buffer = torch.empty(span, dtype=torch.uint8) if len(buffer) < span else buffer
        _read(file, _bytes(buffer[:span]), begin)
        block.copy_(buffer[:span].view(stored.dtype).as_strided(block.shape, (place.stride, 1)))


@torch.no_grad()
def write_part(file: int, stored: StoredTensor, offsets: Sequence[int], part: Tensor) -> None:
    """Write a part of a tensor, in any device's memory, to where it begins; others may write other
    parts meanwhile.

    file: a descriptor of `stored.path`. Raises OSError.
    """
    if not part.numel():
        return
    place = _Place.of(stored, offsets, part.shape)
    if (
        place.is_one_run
        and part.device.type == "cpu"
        and part.is_contiguous()
        and part.dtype == stored.dtype
    ):
        _write(file, _bytes(part), place.begin)
        return
    size, stride = place.run * stored.dtype.itemsize, place.stride * stored.dtype.itemsize
    for block, begin in place.blocks(part.detach().reshape(place.sizes), with_gaps=False):
        host_block = block.to("cpu", stored.dtype).contiguous()
        raw = _bytes(host_block)
        if size == stride:
            _write(file, raw, begin)
            continue
        for number in range(len(block)):
            _write(file, raw[number * size : (number + 1) * size], begin + number * stride)


@dataclass(frozen=True)
class _Place:
    """Where a part of a tensor lies in its file: runs of neighbouring numbers, one for each index
    but the last.
    """

    begin: int
    """Byte of its first number."""
    sizes: tuple[int, ...]
    """Of the part; two dimensions at least."""
    strides: tuple[int, ...]
    """Numbers from one index to the next, by dimension."""
    itemsize: int

    @classmethod
    def of(cls, stored: StoredTensor, offsets: Sequence[int], sizes: Sequence[int]) -> _Place:
        extra = (1,) * max(0, 2 - len(sizes))
        whole, part = (*extra, *stored.shape), (*extra, *sizes)
        strides = tuple(math.prod(whole[dim + 1 :]) for dim in range(len(whole)))
        first = sum(
            at * stride
            for at, stride in zip((0,) * len(extra) + tuple(offsets), strides, strict=True)
        )
        if any(
            at + size > most for at, size, most in zip(offsets, sizes, stored.shape, strict=True)
        ):
            raise ValueError(
                f"a part of {list(sizes)} from {list(offsets)} on is not within"
                f" {list(stored.shape)}"
            )
        return cls(
            stored.begin + first * stored.dtype.itemsize, part, strides, stored.dtype.itemsize
        )

    @property
    def run(self) -> int:
        """Numbers in a run."""
        return self.sizes[-1]

    @property
    def stride(self) -> int:
        """From the begin of a run to that of the next."""
        return self.strides[-2]

    @property
    def is_one_run(self) -> bool:
        """Whether all of it lies together."""
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    def blocks(self, part: Tensor, *, with_gaps: bool) -> Iterator[tuple[Tensor, int]]:
        """Some runs of `part` after the other, [runs, run] as views, and the byte where each such
        block begins.

        with_gaps: what lies between the runs of a block goes through the buffer too.
        """
        gap = self.stride - self.run
        most = BUFFER_BYTES // (self.itemsize * (self.stride if with_gaps else self.run))
        if with_gaps and gap and self.run * self.itemsize >= LONG_RUN_BYTES:
            most = 1
        for outer in itertools.product(*map(range, self.sizes[:-2])):
            at = self.begin + self.itemsize * sum(
                i * s for i, s in zip(outer, self.strides[:-2], strict=True)
            )
            rows = part[outer]
            for low in range(0, len(rows), max(1, most)):
                yield rows[low : low + max(1, most)], at + low * self.stride * self.itemsize


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which has to outlive this. Not by numpy: a
    tensor that has been an array once can never be parked, as its memory then may not be
    resized.
    """
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _read(file: int, into: memoryview, at: int) -> None:
    while into:
        got = os.preadv(file, [into[: 1 << 30]], at)
        if not got:
            raise EOFError(f"a file of tensors ends at byte {at}, within a tensor")
        into, at = into[got:], at + got


def _write(file: int, data: memoryview, at: int) -> None:
    while data:
        put = os.pwrite(file, data[: 1 << 30], at)
        data, at = data[put:], at + put
