"""How the owner of a pool reads what its processes are at."""

from array import array
from typing import Any

from dataflow.scoring.pool import CallChunk, PoolProcess
from dataflow.scoring.server import PROGRESS_FIELDS

NOW_NS = 10**12


class _Begins:
    """Progress of a process that begins a call right after its owner has read anything of it."""

    def __init__(self) -> None:
        self.fields = memoryview(array("q", [0] * PROGRESS_FIELDS))

    def __getitem__(self, key: Any) -> Any:
        found = self.fields[key]
        found = memoryview(array("q", found.tolist())) if isinstance(key, slice) else found
        self.fields[2], self.fields[1], self.fields[0] = NOW_NS, 0, 7
        return found

    def __setitem__(self, key: Any, value: int) -> None:
        self.fields[key] = value


def test_a_call_that_begins_while_its_owner_looks_is_not_late() -> None:
    process = PoolProcess(0, _Begins(), 1, 4)  # type: ignore[arg-type]
    process.chunks[7] = CallChunk(0, 0, {0}, False, 0.0)
    assert process.running(NOW_NS - 10**9) == []
    assert process.running(NOW_NS - 10**9) == [], "it has begun just now"
    assert process.running(NOW_NS + 1) == [(process.chunks[7], 0)]
