"""Reads Arrow files of a run: whole, batch by batch, or their columns alone; what is read is proved
first.
"""

from collections.abc import Collection, Iterator
from pathlib import Path

import pyarrow as pa
import xxhash

from dataflow.system.files import RunFolderError, disk

SUM = b"xxh3_64:"
"""The key in a file's footer, before the sum of all its bytes; `NO_SUM` stands for the sum while it
is computed."""
NO_SUM = b"0" * 16
_TAIL_BYTES = 1 << 15
"""The end of a file, which as a rule holds its footer."""
_DAMAGED = (pa.ArrowException, OSError, ValueError)
"""Errors of Arrow for bytes that it did not write."""


def read_arrow(path: Path, without: Collection[str] = ()) -> pa.Table:
    """The rows of an Arrow IPC file, checked before they are touched. without: columns that are
    passed over, unread. Errors: RunFolderError.
    """
    try:
        with disk("reading", path):
            content = path.read_bytes()
        _prove(path, memoryview(content))
        reader = pa.ipc.open_file(content)
        if without:
            fields = [at for at, name in enumerate(reader.schema.names) if name not in without]
            reader = pa.ipc.open_file(
                content, options=pa.ipc.IpcReadOptions(included_fields=fields)
            )
        table = reader.read_all()
        table.validate(full=True)
        return table
    except _DAMAGED as error:
        raise _damaged(path, error) from error


def stream_arrow(path: Path, columns: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of an Arrow IPC file batch by batch, each checked, so that a large file needs little
    memory. columns: of which it has some; None: all. Errors: RunFolderError.
    """
    try:
        with disk("reading", path):
            _prove(path, memoryview(pa.memory_map(str(path)).read_buffer()))
        with pa.OSFile(str(path)) as file:
            reader = pa.ipc.open_file(file)
            if columns is not None:
                fields = [at for at, name in enumerate(reader.schema.names) if name in columns]
                reader = pa.ipc.open_file(
                    file, options=pa.ipc.IpcReadOptions(included_fields=fields)
                )
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                batch.validate(full=True)
                yield batch
    except _DAMAGED as error:
        raise _damaged(path, error) from error


def arrow_schema(path: Path) -> pa.Schema:
    """The columns of an Arrow IPC file. Errors: RunFolderError."""
    try:
        with disk("reading", path):
            file = pa.OSFile(str(path))
        with file:
            return pa.ipc.open_file(file).schema
    except _DAMAGED as error:
        raise _damaged(path, error) from error


def _prove(path: Path, content: memoryview) -> None:
    """Check the sum in a file's footer; files of an earlier release have none. Errors:
    RunFolderError.
    """
    tail = bytes(content[-_TAIL_BYTES:])
    tail = tail if SUM in tail else bytes(content)
    at = len(content) - len(tail) + tail.rfind(SUM) + len(SUM)
    if SUM not in tail:
        if getattr(pa.ipc.open_file(content), "metadata", None):
            raise _damaged(path, "its sum is not where it was written")
        return
    digest = xxhash.xxh3_64(content[:at])
    digest.update(NO_SUM)
    digest.update(content[at + len(NO_SUM) :])
    if content[at : at + len(NO_SUM)] != digest.hexdigest().encode():
        raise _damaged(path, "its bytes do not have the sum that it was written with")


def _damaged(path: Path, error: object) -> RunFolderError:
    return RunFolderError(
        f"'{path}' is not a whole Arrow file: {error}; it was damaged after it was written: take it"
        " from a backup; a resume that needs it trains its step again, from groups drawn anew"
    )
