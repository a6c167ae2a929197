"""Tensors that ranks share out, on disk: a safetensors file per rank, read back by any number of them; imports torch.

The files are those of torch.distributed.checkpoint's Hugging Face storage, whose reader reads them: a header says where
each piece begins in its tensor. Its writer is not used, because with it the ranks exchange their plans as pickles, in
collectives that training would have to wait for; this one asks nobody.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dataflow.errors import DeadlineError, RunError
from dataflow.system.clocks import Countdown
from dataflow.system.files import RunFolderError, disk

SUFFIX = ".safetensors"
_UNSAID = "writing '{folder}' failed on a rank behind rank 0, and its disk did not take the reason; make room on it"


@dataclass(frozen=True)
class TensorPart:
    """What one rank holds of a tensor, and writes."""

    tensor: Tensor
    offsets: Sequence[int]
    """Where it begins in the whole, by dimension."""


def file_name(rank: int, ranks: int) -> str:
    """Of a rank's file."""
    return f"shard-{rank + 1:05d}-of-{ranks:05d}{SUFFIX}"


def piece_of(tensor: Tensor, rank: int) -> TensorPart | None:
    """What this rank is to write of a tensor; None where that is nothing, or another rank writes the same.

    tensor: whole, then rank 0 writes it; or a DTensor, then the first of those that hold a piece does.
    """
    if not hasattr(tensor, "to_local"):
        return TensorPart(tensor, [0] * tensor.ndim) if rank == 0 else None
    shared: Any = tensor
    mesh = shared.device_mesh
    at = mesh.get_coordinate()
    is_copy = any(place.is_replicate() and index for place, index in zip(shared.placements, at, strict=True))
    if is_copy or not (mesh.mesh == 0).any() or not shared.to_local().numel():
        return None
    (chunk,) = shared.__create_chunk_list__()
    return TensorPart(shared.to_local(), list(chunk.offsets))


def write(path: Path, pieces: Mapping[str, TensorPart]) -> None:
    """Write a rank's pieces, contiguous and in main memory; the file appears whole. RunFolderError names it."""
    offsets = {name: {"saved_offsets": list(piece.offsets)} for name, piece in pieces.items()}
    temporary = path.with_name(f".{path.name}.tmp")
    with explained(path):
        save_file(
            {name: piece.tensor for name, piece in pieces.items()}, temporary,
            metadata={"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)},
        )  # fmt: skip
        temporary.replace(path)


def wait_for(folder: Path, ranks: int, deadline_s: float) -> None:
    """Wait until the files of all ranks are there.

    Raises RunFolderError where a rank left word of why it has none (see `give_up`), DeadlineError after so long.
    """
    wait = Countdown(deadline_s)
    while missing := [rank for rank in range(ranks) if not (folder / file_name(rank, ranks)).exists()]:
        for note in folder.glob("failed-*.txt"):
            raise RunFolderError(note.read_text("utf-8") or _UNSAID.format(folder=folder))
        if wait.is_over:
            raise DeadlineError(
                f"rank 0 waited {deadline_s:.0f} s for the shards of ranks {missing} in '{folder}', and they did not "
                f"come; look whether all ranks write to the same disk, and whether it is slow"
            )
        time.sleep(0.01)


def give_up(folder: Path, rank: int, error: BaseException) -> None:
    """Leave word for rank 0 that this rank's file will not come; without a reason on a disk that takes none."""
    temporary = folder / f".failed-{rank}.tmp"
    with contextlib.suppress(OSError):
        temporary.touch()
        with contextlib.suppress(OSError):
            temporary.write_text(str(error), "utf-8")
        temporary.replace(folder / f"failed-{rank}.txt")


def read(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill tensors, or this rank's pieces of DTensors, from the files of all ranks; no rank waits for another.

    Raises RunError for a tensor that is missing there or has another shape.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(dict(into), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except (CheckpointException, Exception) as error:  # the first is no Exception; whatever is raised means the same
        said = str(error).strip().splitlines()
        raise RunError(
            f"'{folder}' does not hold this state: {type(error).__name__}: {said[-1] if said else ''}; "
            f"resume with the model of the checkpoint"
        ) from error


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """`files.disk` for what safetensors writes too, which tells of the disk's errors in words. RunFolderError."""
    with disk("writing", path):
        try:
            yield
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code) if number else str(error)) from error
