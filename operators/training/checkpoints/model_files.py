"""A checkpoint's weights as files that transformers loads: every rank writes its own parts in
place.

All ranks lay the files out alike, from names and shapes alone; nobody gathers a tensor, and nobody
waits for another.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dataflow.model_files import INDEX
from operators.models.slices import WEIGHTS, FileTensor, narrowed, overlap
from operators.models.tensor_files import StoredTensor, laid_out, write_part
from operators.training.checkpoints.shards import TensorPart, explained

MOST_BYTES = 5 << 30
"""Of a file; a larger tensor has one of its own."""


_AS_IT_IS: Sequence[FileTensor | None] = [None]


@dataclass(frozen=True)
class _Target:
    """A tensor of a file, as a part of a tensor of the module."""

    stored: StoredTensor
    shape: tuple[int, ...]
    """With as many dimensions as the module's."""
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class ModelFiles:
    """Where everything goes."""

    headers: Mapping[Path, tuple[bytes, int]]
    """Of each file, its first bytes, and how many it has in all."""
    targets: Mapping[str, Sequence[_Target]]
    """By the module's name of a tensor."""

    @classmethod
    def of(
        cls,
        folder: Path,
        tensors: Mapping[str, Any],
        cut: Mapping[str, Sequence[FileTensor]],
        name: str = WEIGHTS,
        called_by: Callable[[str], str] = str,
        dtype: torch.dtype | None = None,
    ) -> ModelFiles:
        """tensors: by name, of which only (full) shapes and dtypes are read. cut: as
        `slices.saved_as`. called_by: the name in the file of what is not cut. dtype: that
        parameters are rounded to; None: they are not.
        """
        pieces: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        places: dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...]]]] = {}
        for tensor_name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            for part in cut.get(tensor_name) or _AS_IT_IS:
                called, own = (
                    (called_by(tensor_name), shape) if part is None else (part.name, part.shape)
                )
                is_rounded = dtype is not None and isinstance(tensor, torch.nn.Parameter)
                pieces[called] = own, dtype if is_rounded else tensor.dtype  # type: ignore[assignment]
                whole = (
                    (shape, (0,) * len(shape))
                    if part is None
                    else (part.stored.shape, part.offsets)
                )
                places.setdefault(tensor_name, []).append((called, *whole))
        files = _dealt(pieces, name)
        headers: dict[Path, tuple[bytes, int]] = {}
        stored: dict[str, StoredTensor] = {}
        for file, names in files.items():
            header, size, in_file = laid_out(
                folder / file, {n: pieces[n] for n in names}, {"format": "pt"}
            )
            headers[folder / file] = header, size
            stored |= in_file
        return cls(
            headers,
            {
                tensor_name: [
                    _Target(stored[called], shape, offsets) for called, shape, offsets in placed
                ]
                for tensor_name, placed in places.items()
            },
        )

    def write(self, parts: Mapping[str, Sequence[TensorPart]], *, first: bool) -> None:
        """Write what one rank holds, by name; the `first` one writes what stands before and beside
        the tensors too.

        RunFolderError names the file that cannot be written.
        """
        opened: dict[Path, int] = {}
        with contextlib.ExitStack() as ends:
            for path, (header, size) in self.headers.items():
                with explained(path):
                    opened[path] = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
                    ends.callback(os.close, opened[path])
                    if first:
                        os.ftruncate(opened[path], size)
                        os.pwrite(opened[path], header, 0)
            for name, tensor_parts in parts.items():
                for target in self.targets[name]:
                    with explained(target.stored.path):
                        _write(opened[target.stored.path], target, tensor_parts)
            for path, file in opened.items():
                with explained(path):
                    os.fsync(file)
        if first and len(self.headers) > 1:
            self._write_index()

    def _write_index(self) -> None:
        stored = {target.stored for targets in self.targets.values() for target in targets}
        names = {
            name: path.name for path in self.headers for name in _names_in(self.headers[path][0])
        }
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in stored)},
            "weight_map": names,
        }
        path = next(iter(self.headers)).with_name(INDEX)
        with explained(path):
            path.write_text(json.dumps(index, indent=1), "utf-8")


def _names_in(header: bytes) -> list[str]:
    return [name for name in json.loads(header[8:]) if name != "__metadata__"]


def _write(file: int, target: _Target, parts: Iterable[TensorPart]) -> None:
    for part in parts:
        common = overlap(part.offsets, part.tensor.shape, target.offsets, target.shape)
        if common is None:
            continue
        begin, size = common
        mine = narrowed(
            part.tensor, [at - own for at, own in zip(begin, part.offsets, strict=True)], size
        )
        place = StoredTensor(
            target.stored.path, target.stored.begin, target.stored.dtype, target.shape
        )
        write_part(
            file, place, [at - own for at, own in zip(begin, target.offsets, strict=True)], mine
        )


def _dealt(
    pieces: Mapping[str, tuple[Sequence[int], torch.dtype]], name: str
) -> dict[str, list[str]]:
    """Names of the tensors in each file, none of which is too large."""
    files: list[list[str]] = [[]]
    file_bytes = 0
    for tensor_name, (shape, dtype) in pieces.items():
        size = dtype.itemsize
        for count in shape:
            size *= count
        if files[-1] and file_bytes + size > MOST_BYTES:
            files.append([])
            file_bytes = 0
        files[-1].append(tensor_name)
        file_bytes += size
    if len(files) == 1:
        return {name: files[0]}
    stem, _, ending = name.rpartition(".")
    return {
        f"{stem}-{number:05d}-of-{len(files):05d}.{ending}": names
        for number, names in enumerate(files, start=1)
    }
