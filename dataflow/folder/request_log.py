"""requests.jsonl of a run folder: a line for each request that would change a run under way, and
what came of it.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dataflow.system.files import Extras, Tell, read_lines, to_json, warn

FILE = "requests.jsonl"


class RequestLog:
    """Writes a line for each request that the scheduler answers.

    {"at": seconds since 1970, "by": user@host, "request": for people, as in `generator = 3
    replicas`, "step": that the run had made, "refused": whether nothing was done, "answer": for
    people}.
    """

    def __init__(self, folder: str, tell: Tell, wall: Callable[[], float] = time.time) -> None:
        """folder: of the run; empty: nothing is written. tell: the user, where the disk refuses a
        line.
        """
        self._path = Path(folder) / FILE if folder else None
        self._extras, self._wall = Extras(tell), wall

    def write(self, by: str, request: str, step: int, answer: str, *, refused: bool) -> None:
        """A request was answered."""
        line = {
            "at": self._wall(),
            "by": by,
            "request": request,
            "step": step,
            "refused": refused,
            "answer": answer,
        }
        if self._path is not None:
            self._extras.append(self._path, to_json(line))


def read_requests(folder: Path, tell: Tell = warn) -> list[dict[str, Any]]:
    """The lines of a run's requests.jsonl, without those that a crash tore."""
    return read_lines(folder / FILE, tell)[0]
