"""A launcher that starts nothing: what agents have to know stands in a shared folder, and the test
starts them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.launchers.launcher import Joining
from dataflow.system.files import write_atomically


@dataclass(frozen=True)
class ByHand:
    """For `run(graph, on=ByHand(...))` on the host of the scheduler."""

    hosts: int
    listen: str
    """Address of that host."""
    folder: str
    """Shared; `joining` is the file."""

    def start(self, join: Joining) -> None:
        content = json.dumps(join.agent().to_environ()).encode()
        write_atomically(joining(Path(self.folder)), lambda file: file.write(content), flush=False)

    def ended(self) -> list[str]:
        return []

    def stop(self) -> None:
        joining(Path(self.folder)).unlink(missing_ok=True)


def joining(folder: Path) -> Path:
    return folder / "joining.json"


def told(folder: Path) -> dict[str, Any] | None:
    """Variables for agents; None as long as there are none."""
    path = joining(folder)
    return json.loads(path.read_bytes()) if path.exists() else None  # type: ignore[no-any-return]
