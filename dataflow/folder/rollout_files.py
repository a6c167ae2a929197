"""The rollouts that a trainer was given and an evaluation read, an Arrow file for each step."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import pyarrow as pa
import xxhash

from dataflow.folder.arrow_reading import NO_SUM, SUM, read_arrow
from dataflow.folder.placing import Placing
from dataflow.system.files import RunFolderError, disk, flush_to_disk, write_atomically

COMPRESSED_BYTES = 1 << 20
"""Of rows, from which on a file of them is compressed: 4 ms for each MiB, of which 0.4 MiB are
left. Smaller ones would cost a short step, and whoever reads thousands of them, more than they
save."""
_ZSTD = pa.Codec("zstd", 1)
_FOOTER_BYTES = 1 << 20
"""Of a write in which the sum's place is looked for, at most."""

Rows: TypeAlias = pa.Table | pa.RecordBatch | Iterable[pa.RecordBatch]


@dataclass(frozen=True)
class RolloutFiles:
    """The files of one folder, each whole or not there; holds no open file."""

    path: Path
    placing: Placing
    """How they get their names."""

    def step_file(self, step: int) -> Path:
        """Of what step `step` trained."""
        return self.path / f"step-{step:06d}.arrow"

    def evaluation_file(self, step: int) -> Path:
        """Of what the evaluation at `step` read."""
        return self.path / f"eval-{step:06d}.arrow"

    def write(self, step: int, rows: Rows) -> Path:
        """Write what `step` trained, before it is committed to the ledger. Errors: RunFolderError.

        Whole or not there after any crash of the process; flush() is for power cuts.
        """
        return self._put(self.step_file(step), rows)

    def flush(self, steps: Iterable[int]) -> None:
        """Bring the files of these steps to the disk itself, before the checkpoint after them is
        marked.

        So a power cut takes at most what a resume from that checkpoint makes again. Errors:
        RunFolderError."""
        with disk("flushing", self.path):
            for step in steps:
                flush_to_disk(self.step_file(step))
            flush_to_disk(self.path)

    def read(self, step: int) -> pa.Table:
        """What step `step` trained, in order. Errors: RunFolderError when the file is missing or
        damaged."""
        return self._read(self.step_file(step))

    def write_evaluation(self, step: int, rows: Rows) -> Path:
        """Write what the evaluation at `step` read. Errors: RunFolderError."""
        return self._put(self.evaluation_file(step), rows)

    def read_evaluation(self, step: int) -> pa.Table:
        """What the evaluation at `step` read. Errors: RunFolderError when the file is missing or
        damaged."""
        return self._read(self.evaluation_file(step))

    def files(self, kind: str) -> list[tuple[int, Path]]:
        """Steps and paths of the files that there are, ascending. kind: step | eval."""
        found = [
            (re.fullmatch(rf"{kind}-(\d+)\.arrow", path.name), path)
            for path in self.path.glob(f"{kind}-*.arrow")
        ]
        return sorted((int(match[1]), path) for match, path in found if match)

    def _put(self, path: Path, rows: Rows) -> Path:
        written = self.placing.aside(path)
        write_arrow(written, rows)
        if written != path:
            self.placing.place(written, path, None)
        return path

    def _read(self, path: Path) -> pa.Table:
        self.placing.see(path)
        return read_arrow(path)


def write_arrow(path: Path, rows: Rows) -> None:
    """Write rows as an Arrow IPC file at `path`, whole or not at all. Errors: RunFolderError."""
    table = rows if isinstance(rows, pa.Table) else _table(path, rows)
    with disk("writing", path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: _put_table(file, table), flush=False)


def _table(path: Path, rows: pa.RecordBatch | Iterable[pa.RecordBatch]) -> pa.Table:
    batches = [rows] if isinstance(rows, pa.RecordBatch) else list(rows)
    try:
        return pa.Table.from_batches(batches)
    except (pa.ArrowException, ValueError) as error:
        raise RunFolderError(
            f"rows for '{path}' do not make one table: {error}; give at least one batch, all of one"
            " schema"
        ) from error


class _Summing:
    """A file that sums what goes into it, and knows where its sum is to stand."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self.flush, self._file = file.flush, file
        self._digest, self._place = xxhash.xxh3_64(), 0

    def write(self, content: Any) -> int:
        """As a file has it."""
        self._digest.update(content)
        if (at := bytes(content).rfind(SUM + NO_SUM) if len(content) < _FOOTER_BYTES else -1) >= 0:
            self._place = self._file.tell() + at + len(SUM)
        return self._file.write(content)

    def close(self) -> None:
        """Put the sum in its place."""
        self._file.seek(self._place)
        self._file.write(self._digest.hexdigest().encode())


def _put_table(file: BinaryIO, table: pa.Table) -> None:
    options = pa.ipc.IpcWriteOptions(
        compression=_ZSTD if table.nbytes >= COMPRESSED_BYTES else None
    )
    sink = _Summing(file)
    with pa.ipc.new_file(
        sink, table.schema, options=options, metadata={"sum": SUM + NO_SUM}
    ) as writer:
        writer.write_table(table)
    sink.close()
