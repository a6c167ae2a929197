"""Reads Arrow files of a run: whole, batch by batch, or their columns alone; what is read is checked first."""

from collections.abc import Collection, Iterator
from pathlib import Path

import pyarrow as pa

from dataflow.system.files import RunFolderError, disk


def read_arrow(path: Path, without: Collection[str] = ()) -> pa.Table:
    """The rows of an Arrow IPC file, checked before they are touched. without: columns that are passed over, unread.
    Errors: RunFolderError."""
    try:
        with disk("reading", path):
            source = pa.OSFile(str(path)) if without else path.read_bytes()
        reader = pa.ipc.open_file(source)
        if without:
            kept = [at for at, name in enumerate(reader.schema.names) if name not in without]
            reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=kept))
        table = reader.read_all()
        table.validate(full=True)
        return table
    except pa.ArrowException as error:
        raise _damaged(path, error) from error


def stream_arrow(path: Path, columns: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of an Arrow IPC file batch by batch, each checked, so that a large file needs little memory. columns:
    of which it has some; None: all. Errors: RunFolderError."""
    try:
        with disk("reading", path), pa.OSFile(str(path)) as file:
            reader = pa.ipc.open_file(file)
            if columns is not None:
                wanted = [at for at, name in enumerate(reader.schema.names) if name in columns]
                reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=wanted))
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                batch.validate(full=True)
                yield batch
    except pa.ArrowException as error:
        raise _damaged(path, error) from error


def arrow_schema(path: Path) -> pa.Schema:
    """The columns of an Arrow IPC file. Errors: RunFolderError."""
    try:
        with disk("reading", path), pa.OSFile(str(path)) as file:
            return pa.ipc.open_file(file).schema
    except pa.ArrowException as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> RunFolderError:
    return RunFolderError(
        f"'{path}' is not a whole Arrow file: {error}; it was damaged after it was written: "
        f"take it from a backup, or resume from a checkpoint before it"
    )
