"""What a GGUF file says of itself: metadata, and where its tensors lie. No tensor is read.

The layout is that of the GGUF specification, versions 2 and 3: magic, version, counts, key and
value pairs, tensors' names, shapes, types and offsets, and from the next multiple of the alignment
on the tensors' bytes.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.errors import GraphError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_TEXT, _LIST = 8, 9
_MOST_DIMENSIONS = 4


class GGUFError(GraphError):
    """A GGUF file that is not there, or is not taken: what is wrong, what was found, and what to
    do.
    """


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a file: row-major, from one byte on."""

    shape: tuple[int, ...]
    """As torch has it: the file's dimensions the other way round."""
    kind: str
    """Type of its numbers, as Q4_1."""
    begin: int
    """First byte, in the file."""
    nbytes: int


@dataclass(frozen=True)
class GGUFContent:
    """A file's header."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def need(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Metadata that has to be there. GGUFError where it is not, or of another type."""
        value = self.metadata.get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            names = " or ".join(accepted.__name__ for accepted in kinds)
            raise GGUFError(
                f"{self.path.name} has {key}={value!r:.60}, where {names} has to stand; take"
                " another file of the model"
            )
        return value


def read_content(path: Path) -> GGUFContent:
    """The header of a file; what was read is kept for as long as the file stays the same.
    GGUFError, OSError.
    """
    stat = path.stat()
    return _read(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _read(path: Path, size: int, changed_ns: int) -> GGUFContent:
    with path.open("rb") as file:
        if size < 24 or file.read(4) != _MAGIC:
            raise GGUFError(
                f"{path} is no GGUF file: its first bytes are not {_MAGIC.decode()}; give another"
                " file"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(path, data).content()
            except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
                raise GGUFError(
                    f"{path} is cut off or damaged: its {size} bytes end within its header, or hold"
                    " no text where one has to stand; copy it again"
                ) from error


class _Reader:
    """Reads on from one place."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, len(_MAGIC)

    def content(self) -> GGUFContent:
        version = self._number("<I")
        if version not in _VERSIONS:
            form = "big-endian" if not version & 0xFFFF else f"version {version}"
            raise GGUFError(
                f"{self._path} is a GGUF file of a kind that is not read: {form}; give one of"
                " version 3, little-endian"
            )
        tensors, pairs = self._count(24), self._count(13)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._text()
            if key in metadata:
                raise GGUFError(f"{self._path} is damaged: it has '{key}' twice; copy it again")
            metadata[key] = self._value(self._number("<I"))
        return GGUFContent(self._path, metadata, self._tensors(tensors, metadata))

    def _tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, GGUFTensor]:
        kinds, entries = kinds_of_numbers(), {}
        for _ in range(count):
            name, dimensions = self._text(), self._number("<I")
            if not 0 < dimensions <= _MOST_DIMENSIONS or name in entries:
                raise GGUFError(
                    f"{self._path} is damaged: tensor '{name}' is there twice, or has {dimensions}"
                    " dimensions; copy it again"
                )
            shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
            entries[name] = shape, self._number("<I"), self._number("<Q")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise GGUFError(
                f"{self._path} is damaged: general.alignment is {alignment!r}; copy it again"
            )
        first = self._at + -self._at % alignment
        tensors = {}
        for name, (shape, kind, offset) in entries.items():
            if kind not in kinds:
                raise GGUFError(
                    f"{self._path} holds '{name}' in numbers of type {kind}, which the installed"
                    " gguf does not know; pip install --upgrade gguf, or give a file in another"
                    " quantisation"
                )
            called, block, block_bytes = kinds[kind]
            nbytes = math.prod(shape) // block * block_bytes
            if shape[-1] % block or first + offset + nbytes > len(self._data):
                raise GGUFError(
                    f"{self._path} is cut off or damaged: '{name}', {list(shape)} in {called}, ends"
                    f" at byte {first + offset + nbytes} of {len(self._data)}; copy it again"
                )
            tensors[name] = GGUFTensor(shape, called, first + offset, nbytes)
        return tensors

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _count(self, least_bytes: int) -> int:
        """A number of things of which each takes at least so many bytes."""
        count: int = self._number("<Q")
        if count * least_bytes > len(self._data) - self._at:
            raise IndexError(f"{count} entries from byte {self._at} on")
        return count

    def _text(self) -> str:
        size = self._count(1)
        self._at += size
        return self._data[self._at - size : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _LIST:
            raise IndexError(f"a value of type {kind} before byte {self._at}")
        inner = self._number("<I")
        if inner == _TEXT:
            return [self._text() for _ in range(self._count(8))]
        if inner not in _SCALARS:
            raise IndexError(f"a list of values of type {inner} before byte {self._at}")
        width = struct.calcsize(_SCALARS[inner])
        count = self._count(width)
        self._at += count * width
        return list(
            struct.unpack_from(
                f"<{count}{_SCALARS[inner][1]}", self._data, self._at - count * width
            )
        )


@functools.cache
def kinds_of_numbers() -> dict[int, tuple[str, int, int]]:
    """By a type's number: its name, how many numbers stand in a block, and bytes of a block.
    GGUFError without gguf.
    """
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise GGUFError(
            "GGUF files are read with the package gguf, which is not installed; pip install"
            ' "dataflow-rl[smollm]", or quickly: pip install gguf'
        ) from error
    return {
        int(kind): (str(kind.name), block, size) for kind, (block, size) in GGML_QUANT_SIZES.items()
    }
