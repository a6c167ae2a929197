"""faults.jsonl of a run folder: a line for every end of a worker that the run did not ask for."""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.files import append_line, disk, to_json

FILE = "faults.jsonl"


@dataclass
class _Open:
    """A fault whose worker is not back."""

    line: dict[str, Any]
    noticed: float


class Faults:
    """The book of faults.

    A line is written once, when it is known how the fault ended: the worker is at work again, has died again, or the
    run has ended. {"at": seconds since 1970 when it was noticed, "worker", "cause", "attempt": the one that ended, 0
    for the first, "noticed_s": since its last sign of life, "recovered_s": from `at` until it was at work again, null
    where it never was}.
    """

    def __init__(self, folder: str, clock: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        """folder: of the run; empty: nothing is written. clock: the scheduler's."""
        self._path = Path(folder) / FILE if folder else None
        self._clock, self._wall = clock, wall
        self._open: dict[str, _Open] = {}

    def noticed(self, worker: str, cause: str, attempt: int, heard: float) -> None:
        """A worker has ended; `heard`: when it last gave a sign of life. Errors: RunFolderError."""
        self._write(worker, None)
        now = self._clock()
        line = {
            "at": self._wall(), "worker": worker, "cause": cause, "attempt": attempt,
            "noticed_s": round(now - heard, 3),
        }  # fmt: skip
        self._open[worker] = _Open(line, now)

    def recovered(self, worker: str) -> str | None:
        """A worker is at work; what to tell the user, None where it had not ended. Errors: RunFolderError."""
        fault = self._open.get(worker)
        if fault is None:
            return None
        took = self._clock() - fault.noticed
        self._write(worker, round(took, 3))
        return f"worker {worker} {fault.line['cause']}, restarted after {took:.1f} s"

    def close(self) -> None:
        """The run has ended: write down what was not recovered. Errors: RunFolderError."""
        for worker in list(self._open):
            self._write(worker, None)

    def _write(self, worker: str, recovered_s: float | None) -> None:
        fault = self._open.pop(worker, None)
        if fault is not None and self._path is not None:
            append_line(self._path, to_json({**fault.line, "recovered_s": recovered_s}))


def restarts(folder: Path) -> int:
    """How often a worker of the run in `folder` was started again and came back. Errors: RunFolderError."""
    path = folder / FILE
    with disk("reading", path):
        lines = path.read_bytes().splitlines() if path.exists() else []
    found = 0
    for text in lines:
        with contextlib.suppress(ValueError):  # a line that a crash tore
            line = json.loads(text)
            found += isinstance(line, dict) and line.get("recovered_s") is not None
    return found
