"""What has crossed the edges of one worker, counted in a file that outlives its process."""

import contextlib
import json
import mmap
import os
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import xxhash

from dataflow.system.files import write_atomically
from transport.data.counts import COUNTS_BYTES, EdgeCounts, EndCounts
from transport.data.counts import Crossed as Crossed

ENDS = tuple(field.name for field in fields(EndCounts))
"""The counts of an edge."""
UNITS = Crossed._fields
CrossedEdges: TypeAlias = Mapping[str, Mapping[str, Crossed]]
"""By edge, then by end: its counts."""
CrossedByFile: TypeAlias = Mapping[str, CrossedEdges]
"""By the file that it is counted in: a worker that was started again on its host goes on in the
same one, so what was said of a file last counts, and sums over files are those of the run."""

EdgeSums: TypeAlias = Mapping[str, Mapping[str, Sequence[int]]]
"""The same, over files: of each end the numbers of a `Crossed`."""

_FILES = "counts"
_HEAD = struct.Struct("=16sQ")
"""Of a file: its name, and bytes of the counts behind it, one end of an edge after the other; then
the edges: JSON."""


def path_of(sockets: str, worker: str, replica: int) -> Path | None:
    """The file of a worker's counts. sockets: the folder of its host's sockets; empty: there is
    none, and no file.
    """
    return Path(sockets) / f"{_FILES}.{worker}.{replica}" if sockets else None


class KeptCounts:
    """The counts of one worker's edges. Whoever is started again in its place on the same host goes
    on from there: also what was counted between the last heartbeat and the end is in.
    """

    def __init__(self, path: Path | None, edges: Sequence[str]) -> None:
        """path: of the file; None: the counts end with this process. edges: that begin or end
        here.
        """
        names, nbytes = json.dumps(list(edges)).encode(), len(edges) * len(ENDS) * COUNTS_BYTES
        head = _HEAD.pack(secrets.token_bytes(16), nbytes)
        memory = memoryview(bytearray(head + bytes(nbytes) + names))
        if path is not None:
            memory = _shared(
                path.with_name(f"{path.name}.{xxhash.xxh3_64_hexdigest(names)}"), memory
            )
        self.name, self.edges = _laid_out(memory, edges)
        """What tells the file from every other; the counts of each edge."""

    def read(self) -> dict[str, CrossedEdges]:
        """All of them, as a heartbeat has them; asked in any thread."""
        return {self.name: _told(self.edges)}


class KeptFiles:
    """The files of all workers that have counted in some folders, open: they are read when the
    workers have ended, and the folders may be gone.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._files = contextlib.ExitStack()
        self._open = []
        for path in (path for folder in folders for path in sorted(folder.glob(f"{_FILES}.*"))):
            with contextlib.suppress(FileNotFoundError):
                self._open.append(self._files.enter_context(path.open("rb")))

    def __enter__(self) -> "KeptFiles":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()

    def read(self) -> dict[str, CrossedEdges]:
        """The counts in them now; a foreign file has none."""
        totals = {}
        for file in self._open:
            file.seek(0)
            memory = memoryview(bytearray(file.read()))
            with contextlib.suppress(ValueError, TypeError, struct.error):
                _, nbytes = _HEAD.unpack_from(memory)
                edges = json.loads(bytes(memory[_HEAD.size + nbytes :]))
                name, counts = _laid_out(memory, edges)
                totals[name] = _told(counts)
        return totals


def total(counts_by_worker: Iterable[Mapping[str, EdgeSums]]) -> dict[str, dict[str, list[int]]]:
    """Over all files: by edge what was sent, received and acknowledged: batches, rows, bytes. Of a
    file that several tell of the last one counts.

    >>> sent, received = {"sent": (1, 8, 900)}, {"received": (1, 8, 900)}
    >>> total([{"a": {"x>y:x": sent}}, {"b": {"x>y:x": received}}])
    {'x>y:x': {'sent': [1, 8, 900], 'received': [1, 8, 900], 'acknowledged': [0, 0, 0]}}
    """
    totals: dict[str, dict[str, list[int]]] = {}
    for edges in {
        name: edges for by_file in counts_by_worker for name, edges in by_file.items()
    }.values():
        for edge, ends in edges.items():
            sums = totals.setdefault(edge, {end: [*Crossed()] for end in ENDS})
            for end, counts in ends.items():
                sums[end] = [count + more for count, more in zip(sums[end], counts, strict=True)]
    return totals


def known_edges(plain: Any) -> dict[str, dict[str, list[int]]]:
    """The edges in a file, as `total` has them; invalid ones are left out."""
    counts: dict[str, dict[str, list[int]]] = {}
    for edge, ends in plain.items() if isinstance(plain, dict) else ():
        if isinstance(ends, dict) and all(_is_counted(ends.get(end)) for end in ENDS):
            counts[str(edge)] = {end: list(ends[end]) for end in ENDS}
    return counts


def _is_counted(value: Any) -> bool:
    is_long = isinstance(value, list) and len(value) == len(UNITS)
    return is_long and all(type(count) is int and count >= 0 for count in value)


def _laid_out(memory: memoryview, edges: Sequence[str]) -> tuple[str, dict[str, EndCounts]]:
    """The name and the counts of a file, in its memory. Raises ValueError where these edges are not
    its own.
    """
    name, nbytes = _HEAD.unpack_from(memory)
    if _HEAD.size + nbytes > len(memory):
        raise ValueError(f"{len(memory)} bytes do not hold {nbytes} bytes of counts")
    cells = [
        memory[at : at + COUNTS_BYTES]
        for at in range(_HEAD.size, _HEAD.size + nbytes, COUNTS_BYTES)
    ]
    places = [(edge, end) for edge in edges for end in ENDS]
    counts = {place: EdgeCounts(cell) for place, cell in zip(places, cells, strict=True)}
    return name.hex(), {
        edge: EndCounts(**{end: counts[edge, end] for end in ENDS}) for edge in edges
    }


def _told(counts: Mapping[str, EndCounts]) -> CrossedEdges:
    """The counts above 0."""
    plain = {
        edge: {end: getattr(ends, end).read() for end in ENDS} for edge, ends in counts.items()
    }
    return {
        edge: {end: crossed for end, crossed in ends.items() if any(crossed)}
        for edge, ends in plain.items()
        if any(map(any, ends.values()))
    }


def _shared(path: Path, blank: memoryview) -> memoryview:
    """A file in memory, made of what is blank where there is none yet."""
    if not path.is_file() or path.stat().st_size != len(blank):
        write_atomically(path, lambda file: file.write(blank), flush=False)
    number = os.open(path, os.O_RDWR)
    try:
        return memoryview(mmap.mmap(number, len(blank)))
    finally:
        os.close(number)
