"""What has crossed the edges of one worker, counted in a file that outlives its process."""

import mmap
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from dataflow.system.files import write_atomically

Crossed: TypeAlias = tuple[int, int, int]
"""Batches, rows, bytes."""
ENDS = ("sent", "received", "acknowledged")
"""What is counted of an edge, as `EndCounts` has it."""
UNITS = ("batches", "rows", "bytes")
CrossedEdges: TypeAlias = Mapping[str, Mapping[str, Crossed]]
"""By edge, then by what was counted at an end of it: batches, rows, bytes."""
CrossedByFile: TypeAlias = Mapping[str, CrossedEdges]
"""By the file that it is counted in: a worker that was started again on its host goes on in the same one, so what was
said of a file last counts, and sums over files are those of the run."""

EdgeSums: TypeAlias = Mapping[str, Mapping[str, Sequence[int]]]
"""The same, over files."""

_NAME_BYTES = 16
_CELLS_BYTES = 3 * 8


class KeptCounts:
    """The counts of one worker's edges. Whoever is started again in its place on the same host goes on from there: also
    what was counted between the last heartbeat and the end is in."""

    def __init__(self, path: Path | None, edges: Sequence[str]) -> None:
        """path: of the file; None: the counts end with this process. edges: that begin or end here."""
        self._edges = list(edges)
        size = _NAME_BYTES + len(self._edges) * len(ENDS) * _CELLS_BYTES
        memory = memoryview(bytearray(secrets.token_bytes(_NAME_BYTES) + bytes(size - _NAME_BYTES)))
        if path is not None:
            these = xxhash.xxh3_64_hexdigest(repr(self._edges).encode())
            memory = _shared(path.with_name(f"{path.name}.{these}"), memory)
        self.name = bytes(memory[:_NAME_BYTES]).hex()
        """Tells the file from every other."""
        self._cells = {
            (edge, end): memory[at : at + _CELLS_BYTES]
            for (edge, end), at in zip(
                ((edge, end) for edge in self._edges for end in ENDS), range(_NAME_BYTES, size, _CELLS_BYTES),
                strict=True,
            )
        }  # fmt: skip

    def cells(self, edge: str) -> list[memoryview]:
        """Where one edge is counted, in the order of `ENDS`: three whole numbers of 8 bytes each."""
        return [self._cells[edge, end] for end in ENDS]

    def read(self) -> dict[str, dict[str, dict[str, Crossed]]]:
        """All of them, as a heartbeat has them; asked in any thread."""
        found: dict[str, dict[str, Crossed]] = {}
        for (edge, end), cells in self._cells.items():
            batches, rows, nbytes = cells.cast("q").tolist()
            if batches or nbytes:
                found.setdefault(edge, {})[end] = batches, rows, nbytes
        return {self.name: found}


def total(said: Iterable[Mapping[str, EdgeSums]]) -> dict[str, dict[str, list[int]]]:
    """Over all workers: by edge what was sent, received and acknowledged: batches, rows, bytes.

    >>> total([{"a": {"x>y:x": {"sent": (1, 8, 900)}}}, {"b": {"x>y:x": {"received": (1, 8, 900)}}}])
    {'x>y:x': {'sent': [1, 8, 900], 'received': [1, 8, 900], 'acknowledged': [0, 0, 0]}}
    """
    found: dict[str, dict[str, list[int]]] = {}
    for by_file in said:
        for edges in by_file.values():
            for edge, ends in edges.items():
                sums = found.setdefault(edge, {end: [0, 0, 0] for end in ENDS})
                for end, counts in ends.items():
                    sums[end] = [one + more for one, more in zip(sums[end], counts, strict=True)]
    return found


def known_edges(said: Any) -> dict[str, dict[str, list[int]]]:
    """What a file says of edges, as `total` has it; what is none of that is left out."""
    found: dict[str, dict[str, list[int]]] = {}
    for edge, ends in said.items() if isinstance(said, dict) else ():
        if isinstance(ends, dict) and all(_is_counted(ends.get(end)) for end in ENDS):
            found[str(edge)] = {end: list(ends[end]) for end in ENDS}
    return found


def _is_counted(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(each) is int and each >= 0 for each in value)


def _shared(path: Path, blank: memoryview) -> memoryview:
    """A file in memory, made of what is blank where there is none yet."""
    if not path.is_file() or path.stat().st_size != len(blank):
        write_atomically(path, lambda file: file.write(blank), flush=False)
    number = os.open(path, os.O_RDWR)
    try:
        return memoryview(mmap.mmap(number, len(blank)))
    finally:
        os.close(number)
