"""What a generator keeps of groups until they have an outcome, in Arrow files of the run folder: no
crash makes anybody generate finished rollouts again.

Each process appends to files of its own, <node>/<replica>-<attempt>-<number>.<source>.<kind>, and
removes one when nobody needs its groups. A file ends where a crash tore it: what stands before is
whole, because behind each batch is its seal, an empty batch whose metadata has the sum of all bytes
before it, and no batch is read without it.
"""

import contextlib
import itertools
import re
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from dataflow.folder.partial_rollouts import LINE, SCHEMA, PartialRow, arrow_rows, joined, row_at
from dataflow.records import GROUP_ID, VERSIONS
from dataflow.staleness import newest_versions
from dataflow.system.files import disk, write_atomically
from dataflow.tokens.ragged import group_slices

SEAL = b"xxh3_64"
_MESSAGE = b"\xff\xff\xff\xff"
"""The first bytes of an Arrow message; the size of its head follows."""
_END = _MESSAGE + bytes(4)
_NO_SUM = b"0" * 16
FILE_BYTES = 32 << 20
"""A file ends after so many bytes, and another begins, so that the disk is given back."""


@dataclass(eq=False)
class File:
    """One file, and its groups that are not done with."""

    path: Path
    groups: set[int] = field(default_factory=set)
    damage: str = ""
    """Damage that no crash causes."""

    def read(self) -> Iterator[pa.RecordBatch]:
        """The whole batches, mapped into memory, up to where a crash tore the file, or something
        damaged it.
        """
        proved, behind = 0, 0
        content, ended = memoryview(b""), False
        with contextlib.suppress(pa.ArrowException, OSError, EOFError, ValueError):
            content = memoryview(pa.memory_map(str(self.path)).read_buffer())
            digest, rows = xxhash.xxh3_64(), list[pa.RecordBatch]()
            source = pa.BufferReader(pa.py_buffer(content))
            reader = pa.ipc.open_stream(source)
            while True:
                begin = source.tell()
                try:
                    batch, metadata = reader.read_next_batch_with_custom_metadata()
                except StopIteration:
                    ended = True
                    break
                if metadata is None or SEAL not in metadata:
                    batch.validate(full=True)
                    rows.append(batch)
                    continue
                digest.update(content[proved:begin])
                if metadata[SEAL] != digest.hexdigest().encode():
                    break
                proved, behind = begin, source.tell()
                yield from rows
                rows.clear()
        if not ended and _has_seal(bytes(content[behind:])):
            self.damage = (
                f"'{self.path}' was damaged behind byte {behind}: groups that stand there are drawn"
                " anew"
            )


def _has_seal(content: bytes) -> bool:
    """Whether some seal is there whole, so that all before it was whole too."""
    for at in (match.start() for match in re.finditer(SEAL, content)):
        begin = content.rfind(_MESSAGE, 0, at) + len(_MESSAGE)
        if begin + 4 + int.from_bytes(content[begin : begin + 4], "little") <= len(content):
            return True
    return False


class SealedWriter:
    """Writes such a file, each batch with its seal."""

    def __init__(self, file: IO[bytes] | pa.OSFile, schema: pa.Schema) -> None:
        self._file, self._schema = file, schema
        self._digest = xxhash.xxh3_64()
        self._head = _encoded(schema)
        self._put(self._head)
        empty = pa.RecordBatch.from_arrays(
            [pa.array([], field.type) for field in schema], schema=schema
        )
        self._seal = bytes(_encoded(schema, empty, {SEAL: _NO_SUM})[len(self._head) :])

    def write_batch(self, rows: pa.RecordBatch) -> None:
        """A batch, and its seal."""
        self._put(_encoded(self._schema, rows)[len(self._head) :])
        self._put(self._seal.replace(_NO_SUM, self._digest.hexdigest().encode()))
        self._file.flush()

    def close(self) -> None:
        """End the stream; the owner closes the file."""
        self._file.write(_END)

    def _put(self, content: Any) -> None:
        self._digest.update(content)
        self._file.write(content)


def _encoded(
    schema: pa.Schema,
    rows: pa.RecordBatch | None = None,
    metadata: Mapping[bytes, bytes] | None = None,
) -> Any:
    """A stream that has not ended, of this batch or none."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        if rows is not None:
            stream.write_batch(rows, custom_metadata=metadata)
    return memoryview(sink.getvalue())[: -len(_END)]


class GroupFiles:
    """Rows of the groups of one source of one generator.

    consumes: rows; the news that groups have an outcome, by `forget`
    produces: the rows of a group that earlier processes wrote
    waits for: the disk
    unblocked by: -
    """

    kind: ClassVar[str]
    """How names of files end."""
    schema: ClassVar[pa.Schema | None] = None
    """Only files of this kind are read."""
    first_is_whole: ClassVar[bool] = True
    """Whether the first rows that are found of a group are all of it."""

    def __init__(
        self,
        folder: Path,
        source: str,
        *,
        replica: int = 0,
        attempt: int = 0,
        file_bytes: int = FILE_BYTES,
        waited_for: Callable[[], Collection[int]] | None = None,
    ) -> None:
        """folder: that of the node. No two processes that live at the same time have the same
        replica and attempt.

        waited_for: asked when the first group is looked for, which is then the time of `load`: all
        nodes have started by then, and a trainer that had to has gone back.
        """
        self._folder, self._ending, self._replica, self._attempt = (
            folder,
            f"{source}.{self.kind}",
            replica,
            attempt,
        )
        self._file_bytes, self._waited_for = file_bytes, waited_for
        self._file: File | None = None
        self._sink: pa.OSFile | None = None
        self._writer: SealedWriter | None = None
        self._by_group: dict[int, list[File]] = {}
        self._found: dict[int, list[pa.RecordBatch]] = {}
        """Rows of earlier processes by group, mapped into memory, not read into it."""

    def load(self, waited_for: Collection[int]) -> None:
        """Look at what all processes wrote, of each in its order: of the groups waited for it is
        kept. Files of this replica's earlier attempts that have none of them are removed; other
        replicas may be writing theirs.
        """
        groups = set(waited_for)
        for path in sorted(self._folder.glob(f"*.{self._ending}"), key=_place):
            file = File(path)
            for batch in file.read():
                if self.schema is not None and not batch.schema.equals(self.schema):
                    break
                for group, first, count in group_slices(batch):
                    if group in groups and not (self.first_is_whole and group in self._found):
                        self._found.setdefault(group, []).append(batch.slice(first, count))
                        self._hold(file, group)
            self._let_go(file)

    def forget(self, group: int) -> None:
        """The group has an outcome. Files that hold no other are removed."""
        self._found.pop(group, None)
        for file in self._by_group.pop(group, ()):
            file.groups.discard(group)
            self._let_go(file)

    def close(self) -> None:
        """End the file that is being written; nothing is left of it when all its groups are done
        with.
        """
        file = self._file
        self._end()
        if file is not None:
            self._let_go(file)

    def _earlier(self, group: int) -> list[pa.RecordBatch]:
        """The rows of a group that earlier processes wrote."""
        if self._waited_for is not None:
            waited_for, self._waited_for = self._waited_for(), None
            self.load(waited_for)
        return self._found.get(group, [])

    def _write(self, rows: pa.RecordBatch, groups: Iterable[int]) -> None:
        """Write rows of these groups down. Raises RunFolderError when the disk refuses."""
        with disk("writing", self._folder):
            writer, file = self._open(rows.schema)
            writer.write_batch(rows)
            assert self._sink is not None, "it was opened with the writer"
            is_full = self._sink.tell() > self._file_bytes
        for group in groups:
            self._hold(file, group)
        if is_full:
            self._end()

    def _hold(self, file: File, group: int) -> None:
        """Keep the file until this group is finished."""
        if group not in file.groups:
            file.groups.add(group)
            self._by_group.setdefault(group, []).append(file)

    def _let_go(self, file: File) -> None:
        """Remove a file whose groups are all finished, unless it is being written; other replicas
        may write theirs.
        """
        if not file.groups and file is not self._file and self._is_own(file.path):
            file.path.unlink(missing_ok=True)

    def _is_own(self, path: Path) -> bool:
        """Whether the process that wrote it was this replica, or belonged to a part of the run that
        has ended.
        """
        replica, _, name = path.name.partition("-")
        return replica == str(self._replica) or name.startswith("part")

    def _open(self, schema: pa.Schema) -> tuple[SealedWriter, File]:
        if self._writer is None or self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            names = (
                f"{self._replica}-{self._attempt}-{number}.{self._ending}"
                for number in itertools.count()
            )
            self._file = File(
                next(path for name in names if not (path := self._folder / name).exists())
            )
            self._sink = pa.OSFile(str(self._file.path), "wb")
            self._writer = SealedWriter(self._sink, schema)
        return self._writer, self._file

    def _end(self) -> None:
        if self._writer is not None and self._sink is not None:
            with disk("writing", self._folder):
                self._writer.close()
                self._sink.close()
        self._writer = self._sink = self._file = None


class Finished(GroupFiles):
    """The finished groups of one source of one generator, and not trained yet."""

    kind = "arrows"

    def find(self, group: int) -> pa.RecordBatch | None:
        """The rows of a group that an earlier process finished; None where there is none."""
        return next(iter(self._earlier(group)), None)

    def append(self, rows: pa.RecordBatch) -> None:
        """Write whole groups down, before they are sent on. Raises RunFolderError when the disk
        refuses.
        """
        self._write(rows, pc.unique(rows.column(GROUP_ID)).to_pylist())


class PartialRolloutFiles(GroupFiles):
    """The unfinished rollouts of one source of one generator, beside the finished ones."""

    kind, schema, first_is_whole = "parts", SCHEMA, False
    _line: pa.Schema | None = None
    """With the name of the line that this process writes."""

    def find(self, group: int) -> list[PartialRow]:
        """What each earlier process kept of each of the group's rollouts, whole from its first
        token: the longest first.
        """
        lines: dict[tuple[bytes, int], list[PartialRow]] = defaultdict(list)
        for rows in self._earlier(group):
            for at in range(rows.num_rows):
                row = row_at(rows, at)
                lines[rows.schema.metadata[LINE.encode()], row.position].append(row)
        whole = [line for of_line in lines.values() if (line := joined(of_line)) is not None]
        return sorted(whole, key=lambda row: (-row.rollout.end, row.rollout.finish_reason is None))

    def append(self, rows: Sequence[PartialRow]) -> None:
        """Write rows down. Raises RunFolderError when the disk refuses."""
        if self._line is None:
            self._line = SCHEMA.with_metadata({LINE: uuid.uuid4().hex})
        self._write(arrow_rows(rows, self._line), dict.fromkeys(row.group for row in rows))


def _place(path: Path) -> tuple[str, int]:
    """Sorts the files of a process by their number."""
    process, _, number = path.name.partition(".")[0].rpartition("-")
    return process, int(number) if number.isdecimal() else 0


Keep = Callable[[pa.RecordBatch, pa.BooleanArray], pa.RecordBatch]


def take_out_abandoned(finished: Path, source: str, newest: int) -> int:
    """Forget, of a source, finished groups, parts of unfinished rollouts and turns with a token of
    a version above `newest`.

    finished: the folder that holds those of all generators. Only files of parts of the run that
    have ended are looked at (`dataflow.history.resume` names them), and those without such a token
    stay as they are. A crash on the way leaves each file as it was, or done. Returns how many
    rollouts and stretches there were. Errors: RunFolderError.
    """
    kinds: dict[str, Keep] = {
        "arrows": _whole_groups,
        **dict.fromkeys(("parts", "turns"), _good_rows),
    }
    return sum(
        _rewrite(path, newest, keep)
        for ending, keep in kinds.items()
        for path in sorted(finished.glob(f"*/*-part*.{source}.{ending}"))
    )


def _rewrite(path: Path, newest: int, keep: Keep) -> int:
    """Write a file anew without what is younger; how many rows that is."""
    batches = list(File(path).read())
    filtered = [
        keep(batch, pa.array(newest_versions(batch.column(VERSIONS)) <= newest))
        for batch in batches
    ]
    taken_out: int = sum(batch.num_rows for batch in batches) - sum(
        batch.num_rows for batch in filtered
    )
    nonempty = [batch for batch in filtered if batch.num_rows]

    def write(file: IO[bytes]) -> None:
        writer = SealedWriter(file, nonempty[0].schema)
        for batch in nonempty:
            writer.write_batch(batch)
        writer.close()

    if taken_out and nonempty:
        write_atomically(path, write, what="rewriting")
    elif taken_out:
        with disk("removing", path):
            path.unlink(missing_ok=True)
    return taken_out


def _good_rows(batch: pa.RecordBatch, good: pa.BooleanArray) -> pa.RecordBatch:
    return batch.filter(good)


def _whole_groups(batch: pa.RecordBatch, good: pa.BooleanArray) -> pa.RecordBatch:
    """The groups whose rows are all good."""
    bad = pc.unique(batch.filter(pc.invert(good)).column(GROUP_ID))
    return batch.filter(pc.invert(pc.is_in(batch.column(GROUP_ID), bad)))


def number_finished(folder: Path, part: int) -> None:
    """Give files of finished rollouts, parts and turns names that no later process gives:
    0-part1-0-0.source.arrows.

    folder: of the run. part: how often it was taken up, this time included.
    """
    files = folder / "finished"
    for path in [*files.rglob("*.arrows"), *files.rglob("*.parts"), *files.rglob("*.turns")]:
        replica, _, name = path.name.partition("-")
        if not name.startswith("part"):
            path.replace(path.with_name(f"{replica}-part{part}-{name}"))
