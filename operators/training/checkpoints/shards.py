"""Tensors that ranks share out, on disk: a safetensors file per rank, read back by any number of
them; imports torch.

The files are those of torch.distributed.checkpoint's Hugging Face storage, whose reader reads them:
a header says where each part begins in its tensor. Its writer is not used, because with it the
ranks exchange their plans as pickles, in collectives that training would have to wait for; this one
asks nobody, and holds no copy.

All ranks lay the files out alike, from names and shapes alone; nobody gathers a tensor, and nobody
waits for another.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from dataflow.errors import DeadlineError, RunError
from dataflow.model_files import INDEX
from dataflow.system.clocks import Countdown
from dataflow.system.files import RunFolderError, disk
from operators.models.slices import WEIGHTS, FileTensor, boxes, held, narrowed, overlap, whole
from operators.models.tensor_files import StoredTensor, content_of, laid_out, read_part, write_part
from operators.training.learner.together import local

SUFFIX = ".safetensors"
_SHARDING = "DCP_SHARDING_INFO"
_AGAIN = "//"
"""Between a tensor's name and a number, where a rank holds parts of it that do not lie together."""
_UNSAID = (
    "writing '{folder}' failed on a rank behind rank 0, and its disk did not take the reason; make"
    " room on it"
)


@dataclass(frozen=True)
class TensorPart:
    """What one rank holds of a tensor, and writes."""

    tensor: Tensor
    offsets: Sequence[int]
    """Where it begins in the whole, by dimension."""


def file_name(rank: int, ranks: int) -> str:
    """Of a rank's file."""
    return f"shard-{rank + 1:05d}-of-{ranks:05d}{SUFFIX}"


def parts_of(
    tensor: Any, rank: int, copied: Callable[[Tensor], Tensor] = lambda own: own
) -> list[TensorPart]:
    """The parts of a tensor that this rank writes: none where it has none, or another rank writes
    the same.

    tensor: whole, then rank 0 writes it; or a DTensor, then the first of those that hold a part
    does. Parts are views of what the rank holds, or of what `copied` makes of it.
    """
    if not hasattr(tensor, "to_local"):
        runs = whole(tensor.shape) if rank == 0 else None
    else:
        mesh = tensor.device_mesh
        at = mesh.get_coordinate()
        is_copy = any(
            place.is_replicate() and index
            for place, index in zip(tensor.placements, at, strict=True)
        )
        runs = held(tensor) if not is_copy and bool((mesh.mesh == 0).any()) else None
    own = local(tensor).detach()
    if runs is None or not own.numel():
        return []
    own_copy = copied(own)
    return [
        TensorPart(narrowed(own_copy, own_first, size), list(first))
        for first, own_first, size in boxes(runs)
    ]


def write(path: Path, pieces: Mapping[str, Sequence[TensorPart]]) -> None:
    """Write a rank's parts, by the names of their tensors; the file appears whole. RunFolderError
    names it.
    """
    named = {
        f"{name}{_AGAIN}{number}" if number else name: part
        for name, parts in pieces.items()
        for number, part in enumerate(parts)
    }
    offsets = {name: {"saved_offsets": list(part.offsets)} for name, part in named.items()}
    temporary = path.with_name(f".{path.name}.tmp")
    header, size, places = laid_out(
        temporary,
        {name: (part.tensor.shape, part.tensor.dtype) for name, part in named.items()},
        {"format": "pt", "DCP_VERSION": "1.0", _SHARDING: json.dumps(offsets)},
    )
    with explained(path):
        with temporary.open("wb") as file:
            file.write(header)
            file.truncate(size)
            file.flush()
            for name, part in named.items():
                write_part(file.fileno(), places[name], [0] * part.tensor.ndim, part.tensor)
            os.fsync(file.fileno())
        temporary.replace(path)


def wait_for(folder: Path, ranks: int, deadline_s: float) -> None:
    """Wait until the files of all ranks are there.

    Raises RunFolderError where a rank left word of why it has none (see `give_up`), DeadlineError
    after so long.
    """
    wait = Countdown(deadline_s)
    while missing := [
        rank for rank in range(ranks) if not (folder / file_name(rank, ranks)).exists()
    ]:
        for note in folder.glob("failed-*.txt"):
            raise RunFolderError(note.read_text("utf-8") or _UNSAID.format(folder=folder))
        if wait.is_over:
            raise DeadlineError(
                f"rank 0 waited {deadline_s:.0f} s for the shards of ranks {missing} in '{folder}',"
                " and they did not come; look whether all ranks write to the same disk, and"
                " whether it is slow"
            )
        time.sleep(0.01)


def give_up(folder: Path, rank: int, error: BaseException) -> None:
    """Leave word for rank 0 that this rank's file will not come; without a reason on a disk that
    takes none.
    """
    temporary = folder / f".failed-{rank}.tmp"
    with contextlib.suppress(OSError):
        temporary.touch()
        with contextlib.suppress(OSError):
            temporary.write_text(str(error), "utf-8")
        temporary.replace(folder / f"failed-{rank}.txt")


def read(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill tensors, or this rank's parts of DTensors, from the files of all ranks; no rank waits
    for another.

    Raises RunError for a tensor that is missing there or has another shape.
    """
    try:
        stored = _stored(folder)
        for name, tensor in into.items():
            own, parts = local(tensor).detach(), stored.get(name, ())
            ends = [
                [at + size for at, size in zip(offsets, place.shape, strict=True)]
                for place, offsets in parts
            ]
            shape = [max(of_dim) for of_dim in zip(*ends, strict=True)]
            if not parts or shape != list(tensor.shape):
                raise ValueError(
                    f"it has '{name}' {shape if parts else 'not'}, and {list(tensor.shape)} is"
                    " needed"
                )
            missing = own.numel()
            for first, own_first, size in boxes(held(tensor)):
                missing -= sum(
                    _read(place, offsets, first, narrowed(own, own_first, size))
                    for place, offsets in parts
                )
            if missing:
                raise ValueError(f"the file of some rank is missing: it has not all of '{name}'")
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise RunError(
            f"'{folder}' does not hold this state: {error}; resume with the model of the checkpoint"
        ) from error


def _stored(folder: Path) -> dict[str, list[tuple[StoredTensor, Sequence[int]]]]:
    """By name, the parts of each tensor in a folder's files, and where they begin in it."""
    by_name: dict[str, list[tuple[StoredTensor, Sequence[int]]]] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        content = content_of(path)
        sharding = json.loads(content.metadata[_SHARDING])
        for name, place in content.tensors.items():
            by_name.setdefault(name.partition(_AGAIN)[0], []).append(
                (place, sharding[name]["saved_offsets"])
            )
    return by_name


def _read(place: StoredTensor, offsets: Sequence[int], first: Sequence[int], into: Tensor) -> int:
    """Read what a stored part has of the box that begins at `first` of the whole tensor; how many
    numbers that is.
    """
    common = overlap(first, into.shape, offsets, place.shape)
    if common is None:
        return 0
    begin, size = common
    file = os.open(place.path, os.O_RDONLY)
    try:
        read_part(
            file,
            place,
            [at - own for at, own in zip(begin, offsets, strict=True)],
            narrowed(into, [at - own for at, own in zip(begin, first, strict=True)], size),
        )
    finally:
        os.close(file)
    return math.prod(size)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """`files.disk` for safetensors as well, which reports the disk's errors as text.
    RunFolderError.
    """
    with disk("writing", path):
        try:
            yield
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code) if number else str(error)) from error


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
        size = math.prod(shape) * dtype.itemsize
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
