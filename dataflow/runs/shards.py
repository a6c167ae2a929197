"""A data set on the disk: Parquet files that are written a batch at a time, in a folder that is
there whole or not."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from dataflow.errors import RunError
from dataflow.system.files import RunFolderError, disk, flush_to_disk

THEN = "or name another place with --out: nothing is left at it"
"""What to do where a disk is full."""
GROUP_BYTES = 32 << 20
"""Of rows that are held before they are written as one row group."""
SHARD_BYTES = 512 << 20
"""Of a file, after which the next is begun."""


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which is at `out` when the block ends well, and nowhere when it does not.

    A process that is killed leaves what it had under a hidden name beside it. Errors: RunError
    where something stands there; RunFolderError."""
    refuse_existing(out)
    made = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with disk("making", made, THEN):
            made.mkdir(parents=True)
        yield made
        refuse_existing(out)
        with disk("putting in place", out, THEN):
            for path in (*made.rglob("*"), made):
                flush_to_disk(path)
            made.rename(out)
            flush_to_disk(out.parent)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def refuse_existing(out: Path) -> None:
    """Errors: RunError where something stands at `out`."""
    if out.exists() or out.is_symlink():
        raise RunError(
            f"'{out}' is there already, and nothing is written over; name another place with --out"
        )


class ExportShards:
    """The files of one split: <folder>/<split>-00000.parquet and so on.

    consumes: batches of one schema
    produces: files
    waits for: the disk
    unblocked by: -
    """

    def __init__(
        self, folder: Path, split: str, schema: pa.Schema, *, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._folder, self._split, self._schema, self._shard_bytes = (
            folder,
            split,
            schema,
            shard_bytes,
        )
        self._held: list[pa.RecordBatch] = []
        self._held_bytes, self._files = 0, 0
        self._file: BinaryIO | None = None
        self._writer: pq.ParquetWriter | None = None
        self.rows = 0
        """That it was given."""

    def write(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Errors: RunFolderError."""
        for batch in batches:
            for piece in _pieces(batch):
                self._held.append(piece)
                self._held_bytes += piece.nbytes
                self.rows += piece.num_rows
                if self._held_bytes >= GROUP_BYTES:
                    self._flush()

    def close(self) -> None:
        """The last file is whole. Errors: RunFolderError."""
        self._flush()
        self._end()

    def abort(self) -> None:
        """Let go of the file, whatever state it is in."""
        with contextlib.suppress(OSError, ValueError, pa.ArrowException, RunFolderError):
            self._end()

    def _flush(self) -> None:
        if not self._held:
            return
        with disk("writing", self._folder, THEN):
            if self._writer is None:
                path = self._folder / f"{self._split}-{self._files:05d}.parquet"
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = path.open("xb")
                self._writer = pq.ParquetWriter(self._file, self._schema, compression="zstd")
                self._files += 1
            self._writer.write_table(pa.Table.from_batches(self._held, self._schema))
            self._held, self._held_bytes = [], 0
            if self._file is not None and self._file.tell() >= self._shard_bytes:
                self._end()

    def _end(self) -> None:
        writer, file = self._writer, self._file
        self._writer = self._file = None
        with disk("writing", self._folder, THEN), contextlib.ExitStack() as stack:
            if file is not None:
                # which writes what it holds: the disk may refuse that too
                stack.callback(file.close)
            if writer is not None:
                writer.close()


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Slices of a batch that are not much larger than a row group."""
    count = max(1, -(-batch.nbytes // GROUP_BYTES))
    rows = max(1, -(-batch.num_rows // count))
    for first in range(0, batch.num_rows, rows):
        yield batch.slice(first, rows)
