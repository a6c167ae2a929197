"""Files of a run folder that other hosts may read, by name, in chunks."""

import os
from pathlib import Path

import xxhash

from dataflow.folder.disks.messages import (
    Answer,
    CannotRead,
    FileChunk,
    Listed,
    ListFiles,
    ReadFile,
)

CHUNK_BYTES = 4 << 20
GIVEN = ("checkpoints", "logs", "metrics.jsonl", "rollouts")
"""Keys, sockets and the ledger are not among them."""


def answer(folder: Path, request: ListFiles | ReadFile) -> Answer:
    """The answer to a request; a refusal where the file cannot be read."""
    path = Path(request.path)
    if path.is_absolute() or ".." in path.parts or not path.parts or path.parts[0] not in GIVEN:
        return CannotRead(
            f"'{request.path}' is none of the files that a host gives ({', '.join(GIVEN)})"
        )
    try:
        if isinstance(request, ListFiles):
            return Listed(_files(folder, folder / path))
        return _chunk(folder / path, request.offset)
    except (OSError, ValueError) as error:  # of a name that no file can have
        return CannotRead(
            f"'{request.path}' cannot be read there: {getattr(error, 'strerror', None) or error}"
        )


def _files(folder: Path, path: Path) -> dict[str, int]:
    """All files but those that are being written, or have no place yet."""
    paths = (
        [path] if path.is_file() else sorted(below for below in path.rglob("*") if below.is_file())
    )
    return {
        str(file.relative_to(folder)): file.stat().st_size
        for file in paths
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
    }


def _chunk(path: Path, offset: int) -> FileChunk:
    with path.open("rb") as file:
        facts = os.fstat(file.fileno())  # another file may stand there by now
        file.seek(offset)
        data = file.read(CHUNK_BYTES)
    return FileChunk(
        data=data,
        size=facts.st_size,
        stamp=f"{facts.st_ino}/{facts.st_mtime_ns}/{facts.st_size}",
        checksum=xxhash.xxh3_64_hexdigest(data),
    )
