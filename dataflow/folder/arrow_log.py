"""Arrow streams that one process appends to and later ones read, in files that go when all their groups are done with.

Each process writes files of its own, <replica>-<attempt>-<number>.<ending>, and removes one when nobody needs its
groups. A file ends where a crash tore it: what stands before is whole, because each batch is checked when it is read.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from dataflow.system.files import disk

FILE_BYTES = 32 << 20
"""After so much a file is ended and another begun, so that the disk is given back."""


@dataclass(eq=False)
class File:
    """One file, and its groups that are not done with."""

    path: Path
    groups: set[int] = field(default_factory=set)

    def read(self) -> Iterator[pa.RecordBatch]:
        """The whole batches, mapped into memory, up to where a crash tore the file."""
        with contextlib.suppress(pa.ArrowException, OSError, EOFError):
            reader = pa.ipc.open_stream(pa.memory_map(str(self.path)))
            while True:
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    return
                batch.validate(full=True)
                yield batch


class ArrowLog:
    """The files of one ending in one folder.

    consumes: rows by `append`; the news that groups are done with, by `forget`
    produces: what earlier processes wrote, by `earlier`
    waits for: the disk
    unblocked by: -
    """

    def __init__(
        self, folder: Path, ending: str, *, replica: int = 0, attempt: int = 0, file_bytes: int = FILE_BYTES
    ) -> None:
        """No two processes that live at the same time have the same replica and attempt."""
        self._folder, self._ending, self._replica, self._attempt = folder, ending, replica, attempt
        self._file_bytes = file_bytes
        self._file: File | None = None
        self._sink: pa.OSFile | None = None
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None
        self._by_group: dict[int, list[File]] = {}

    def earlier(self) -> list[File]:
        """All files that are there, those of one process in the order in which it wrote them."""
        return [File(path) for path in sorted(self._folder.glob(f"*.{self._ending}"), key=_place)]

    def hold(self, file: File, group: int) -> None:
        """The file is needed as long as this group is not done with."""
        if group not in file.groups:
            file.groups.add(group)
            self._by_group.setdefault(group, []).append(file)

    def append(self, rows: pa.RecordBatch, groups: Iterable[int]) -> None:
        """Write rows of these groups down. Raises RunFolderError when the disk refuses."""
        with disk("writing", self._folder):
            writer, file = self._open(rows.schema)
            writer.write_batch(rows)
            assert self._sink is not None, "it was opened with the writer"
            is_full = self._sink.tell() > self._file_bytes
        for group in groups:
            self.hold(file, group)
        if is_full:
            self._end()

    def forget(self, group: int) -> None:
        """The group is done with. Files that hold no other are removed."""
        for file in self._by_group.pop(group, ()):
            file.groups.discard(group)
            self.let_go(file)

    def let_go(self, file: File) -> None:
        """Remove a file in which no group is waited for, unless it is written to; other replicas may write theirs."""
        if not file.groups and file is not self._file and self._is_own(file.path):
            file.path.unlink(missing_ok=True)

    def close(self) -> None:
        """End the file that is being written; nothing is left of it when all its groups are done with."""
        file = self._file
        self._end()
        if file is not None:
            self.let_go(file)

    def _is_own(self, path: Path) -> bool:
        """Whether the process that wrote it was this replica, or belonged to a part of the run that has ended."""
        replica, _, rest = path.name.partition("-")
        return replica == str(self._replica) or rest.startswith("part")

    def _open(self, schema: pa.Schema) -> tuple[pa.ipc.RecordBatchStreamWriter, File]:
        if self._writer is None or self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            names = (f"{self._replica}-{self._attempt}-{number}.{self._ending}" for number in itertools.count())
            self._file = File(next(path for name in names if not (path := self._folder / name).exists()))
            self._sink = pa.OSFile(str(self._file.path), "wb")
            self._writer = pa.ipc.new_stream(self._sink, schema)
        return self._writer, self._file

    def _end(self) -> None:
        if self._writer is not None and self._sink is not None:
            with disk("writing", self._folder):
                self._writer.close()
                self._sink.close()
        self._writer = self._sink = self._file = None


def _place(path: Path) -> tuple[str, int]:
    """Sorts the files of a process by their number."""
    process, _, number = path.name.partition(".")[0].rpartition("-")
    return process, int(number) if number.isdecimal() else 0
