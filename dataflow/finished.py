"""Rollouts that are finished and not trained yet, in Arrow files of the run folder: no crash makes anybody generate
them again.

A generator's process appends every group before it sends it on, and lets go of it when it has an outcome. Each process
writes files of its own, <node>/<replica>-<attempt>-<number>.arrows, and removes one when all its groups are done with.
A file ends where the crash tore it: what stands before is whole, because each batch is checked when it is read.
"""

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from dataflow.files import disk
from dataflow.records import GROUP_ID

FILE_BYTES = 32 << 20
"""After so much a file is ended and another begun, so that the disk is given back."""


@dataclass
class _File:
    """One file, and its groups that are not done with."""

    path: Path
    groups: set[int] = field(default_factory=set)


class Finished:
    """The finished groups of one lane of one generator.

    consumes: rows by `append`; the news that groups have an outcome, by `forget`
    produces: the rows of a group that some process finished before, by `find`
    waits for: the disk
    unblocked by: -
    """

    def __init__(
        self, folder: Path, lane: str, *, replica: int = 0, attempt: int = 0, file_bytes: int = FILE_BYTES
    ) -> None:
        """folder: that of the node. No two processes of a run have the same replica and attempt."""
        self._folder, self._lane, self._replica, self._attempt = folder, lane, replica, attempt
        self._file_bytes = file_bytes
        self._numbers = itertools.count()
        self._file: _File | None = None
        self._sink: pa.OSFile | None = None
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None
        self._found: dict[int, tuple[_File, pa.RecordBatch]] = {}
        """Rows of earlier processes by group, mapped into memory, not read into it."""
        self._mine: dict[int, _File] = {}

    def load(self, waited_for: Collection[int]) -> None:
        """Look at what all processes finished: of the groups waited for it is kept. Files of this replica's earlier
        attempts that have none of them are removed; other replicas may be writing theirs."""
        wanted = set(waited_for)
        for path in sorted(self._folder.glob(f"*.{self._lane}.arrows")):
            file = _File(path)
            for batch in _read(path):
                for group, rows in _groups(batch):
                    if group in wanted and group not in self._found:
                        self._found[group] = (file, rows)
                        file.groups.add(group)
            if not file.groups and path.name.startswith(f"{self._replica}-"):
                path.unlink(missing_ok=True)

    def find(self, group: int) -> pa.RecordBatch | None:
        """The rows of a group that an earlier process finished; None where there is none."""
        found = self._found.get(group)
        return None if found is None else found[1]

    def append(self, rows: pa.RecordBatch) -> None:
        """Write whole groups down, before they are sent on. Raises RunFolderError when the disk refuses."""
        with disk("writing", self._folder):
            writer, file = self._open(rows.schema)
            writer.write_batch(rows)
            assert self._sink is not None, "it was opened with the writer"
            is_full = self._sink.tell() > self._file_bytes
        for group in pc.unique(rows.column(GROUP_ID)).to_pylist():
            file.groups.add(group)
            self._mine[group] = file
        if is_full:
            self._end()

    def forget(self, group: int) -> None:
        """The group has an outcome. A file that holds no other is removed."""
        found = self._found.pop(group, None)
        for file in filter(None, (self._mine.pop(group, None), found and found[0])):
            file.groups.discard(group)
            if not file.groups and file is not self._file:
                file.path.unlink(missing_ok=True)

    def close(self) -> None:
        """End the file that is being written; nothing is left of it when all its groups are done with."""
        file = self._file
        self._end()
        if file is not None and not file.groups:
            file.path.unlink(missing_ok=True)

    def _open(self, schema: pa.Schema) -> tuple[pa.ipc.RecordBatchStreamWriter, _File]:
        if self._writer is None or self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"{self._replica}-{self._attempt}-{next(self._numbers)}.{self._lane}.arrows"
            self._file = _File(self._folder / name)
            self._sink = pa.OSFile(str(self._file.path), "wb")
            self._writer = pa.ipc.new_stream(self._sink, schema)
        return self._writer, self._file

    def _end(self) -> None:
        if self._writer is not None and self._sink is not None:
            with disk("writing", self._folder):
                self._writer.close()
                self._sink.close()
        self._writer = self._sink = self._file = None


def _read(path: Path) -> Iterator[pa.RecordBatch]:
    """The whole batches of a file, up to where a crash tore it."""
    with contextlib.suppress(pa.ArrowException, OSError, EOFError):
        reader = pa.ipc.open_stream(pa.memory_map(str(path)))
        while True:
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                return
            batch.validate(full=True)
            yield batch


def _groups(batch: pa.RecordBatch) -> Iterable[tuple[int, pa.RecordBatch]]:
    """The groups of a batch, whose rows stand side by side."""
    ids = batch.column(GROUP_ID).to_pylist()
    start = 0
    for group, run in itertools.groupby(ids):
        count = len(list(run))
        yield group, batch.slice(start, count)
        start += count
