"""Where a run's scheduler listens: written by each that takes the place, looked up by workers that
hear nothing.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from dataflow.system.files import to_json, write_atomically

_FILE = "whereabouts.json"
"""In the folder of the run's sockets."""


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """Addresses of a scheduler; no two that live at a time have the same."""

    control: str
    """For workers."""
    commands: str
    """For whoever asks something of the run."""
    ledger: str = ""
    """Of the process that has the ledger open for all; empty: each worker opens the file."""

    def write(self, folder: Path) -> None:
        """Put it where workers look. Errors: RunFolderError."""
        content = to_json(asdict(self)).encode()
        write_atomically(folder / _FILE, lambda file: file.write(content), flush=False)

    @classmethod
    def read(cls, folder: Path) -> "Whereabouts | None":
        """What the last scheduler wrote; None where there is nothing."""
        try:
            return cls(**json.loads((folder / _FILE).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
