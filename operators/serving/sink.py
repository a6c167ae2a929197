"""Where recorded rollouts go: an Arrow IPC stream that is appended to, and read up to its last
whole batch.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from dataflow.errors import RunError
from dataflow.records import GROUP_ID, ROLLOUT_ID, schema
from dataflow.system.files import disk
from operators.serving.rows import COLUMNS, GroupIds


class RolloutLog:
    """An Arrow IPC stream of rows with COLUMNS, one batch for each prompt of a call; one process
    writes it.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` to append to; what a crash left of a torn batch is cut off.

        Raises:
            RunError: another process writes it, or it holds something else.
            RunFolderError: the disk says no.
        """
        self.path = path
        with disk("opening", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
            self.numbers, end = self._read()
            with disk("cutting a torn batch off", path):
                os.ftruncate(self._handle, end)
                os.lseek(self._handle, end, os.SEEK_SET)
            if not end:
                self._write(schema(COLUMNS).serialize())
        except BaseException:
            os.close(self._handle)
            raise

    def append(self, rows: pa.RecordBatch) -> None:
        """Write a batch, in one piece; it is the operating system's when this returns. Errors:
        RunFolderError.
        """
        self._write(rows.serialize())

    def close(self) -> None:
        """Close the file; readable as it is."""
        os.close(self._handle)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be appended to; found another process writing it; name another"
                " file"
            ) from error

    def _read(self) -> tuple[GroupIds, int]:
        """The numbers that are free, and where the last whole batch ends."""
        group = rollout = -1
        end = 0
        if os.fstat(self._handle).st_size:
            with pa.OSFile(str(self.path)) as source:
                for batch, end in _batches(source, self.path):  # noqa: B007
                    if batch is not None and batch.num_rows:
                        group = max(group, pc.max(batch.column(GROUP_ID)).as_py())
                        rollout = max(rollout, pc.max(batch.column(ROLLOUT_ID)).as_py())
        return GroupIds(group + 1, rollout + 1), end

    def _write(self, piece: pa.Buffer) -> None:
        end = os.lseek(self._handle, 0, os.SEEK_CUR)
        unwritten = memoryview(piece)
        with disk("appending to", self.path):
            try:
                while unwritten:
                    unwritten = unwritten[os.write(self._handle, unwritten) :]
            except OSError:
                os.ftruncate(self._handle, end)
                os.lseek(self._handle, end, os.SEEK_SET)
                raise


def read_rollouts(path: str | Path) -> pa.Table:
    """All whole batches of a file of rollouts, also while it is written or after a crash.

    Raises:
        RunError: it is no such file.
    """
    with disk("reading", Path(path)), pa.OSFile(str(path)) as source:
        batches = [batch for batch, _ in _batches(source, Path(path)) if batch is not None]
    return pa.Table.from_batches(batches, schema(COLUMNS))


def _batches(source: pa.NativeFile, path: Path) -> Iterator[tuple[pa.RecordBatch | None, int]]:
    """Each whole batch and where it ends; first None and where the schema ends."""
    expected = schema(COLUMNS)
    messages = pa.ipc.MessageReader.open_stream(source)
    try:
        actual = pa.ipc.read_schema(messages.read_next_message())
    except (StopIteration, OSError, pa.ArrowInvalid) as error:
        raise RunError(
            f"{path} is no stream of rollouts; found no Arrow schema in it; name another file"
        ) from error
    if not actual.equals(expected):
        raise RunError(
            f"{path} has other columns; found {actual.names}, not {expected.names}; name another"
            " file"
        )
    yield None, source.tell()
    while True:
        try:
            message = messages.read_next_message()
        except (StopIteration, OSError, pa.ArrowInvalid):
            return
        yield pa.ipc.read_record_batch(message, expected), source.tell()
