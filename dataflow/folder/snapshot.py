"""What a scheduler knows, for the one that takes its place: written before anything that follows
from it is sent.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflow.errors import RunError
from dataflow.system.files import plain, to_json, write_atomically

FILE = "scheduler-{}.json"
"""The name in the folder of the run's sockets, which is in memory and goes with the run; one file
for each scheduler, so that a replaced one spoils no other's."""


@dataclass
class SnapshotFile:
    """One file with named parts; each gives its plain values.

    consumes: what the parts say of themselves
    produces: the file, whenever that has changed
    waits for: memory
    unblocked by: -
    """

    folder: Path
    parts: dict[str, Callable[[], Any]] = field(default_factory=dict)
    number: int = 0
    """Number of the scheduler: a later one has a larger."""
    clock: Callable[[], float] = time.monotonic
    """The run's clock: the time of writing stands in the file as `at`."""
    _written: str = ""

    def write(self) -> None:
        """Write what has changed; nothing is flushed, as no machine's end is outlived. Errors:
        RunFolderError, once for each time that something changed.
        """
        parts = {name: part() for name, part in self.parts.items()}
        if (changed := _json(parts)) != self._written:
            self._written = changed
            content = _json({**parts, "at": self.clock()}).encode()
            write_atomically(
                self.folder / FILE.format(self.number),
                lambda file: file.write(content),
                flush=False,
            )


def _json(parts: Mapping[str, Any]) -> str:
    """As `to_json`, which walks through all values; nearly always they are plain already."""
    try:
        return json.dumps(parts, default=plain, allow_nan=False, ensure_ascii=False)
    except ValueError:  # a number that JSON does not know
        return to_json(parts)


def read(folder: Path) -> Mapping[str, Any]:
    """What the last scheduler that decided anything left in the folder of the run's sockets.
    Errors: RunError when it is no whole file.
    """
    try:
        last = max(
            folder.glob(FILE.format("*")),
            key=lambda path: int(path.stem.rpartition("-")[2]),
            default=folder,
        )
        snapshot: Mapping[str, Any] = json.loads(last.read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(
            f"the scheduler that has ended left nothing to go on with in '{folder.name}': {error}"
        ) from error
    return snapshot
