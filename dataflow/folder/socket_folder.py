"""The folder in memory for a run's sockets: how it is made, and how it is recognised as that
run's."""

import contextlib
import json
import os
import re
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from dataflow.errors import RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.system.files import disk, to_json, write_atomically

CONTROL = "control.json"
"""In the folder of a run under way: the address of its commands, which lies in the folder here."""
MARK = "run"
"""In the folder: the run folder that it belongs to."""
_MEMORY = Path("/dev/shm")
_PREFIX, _MODE = "dataflow-", 0o700
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")


def make() -> Path:
    """A folder of mode 0700 for the run's sockets and shared memory; it goes when the run ends,
    however it ends.
    """
    return Path(
        tempfile.mkdtemp(prefix=_PREFIX, dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None)
    )


def mark(place: Path, folder: RunFolder) -> None:
    """Write down the run that a folder belongs to. Errors: RunFolderError."""
    with disk("writing", place / MARK):
        (place / MARK).write_text(_identity(folder))


def of(folder: RunFolder) -> Path | None:
    """The one that a run has, or had when it was killed; None where there is none.

    What control.json says is believed of nothing but what `make` and `mark` made for this very run
    folder: it stands where they put it, it is this user's alone, and says itself that it belongs
    there.
    """
    with contextlib.suppress(RunError, OSError, AttributeError, ValueError):
        address = str(folder.read_json(CONTROL).get("address", ""))
        place = Path(address.removeprefix("ipc://")).parent
        is_ours = (
            place.parent in _parents()
            and _NAME.fullmatch(place.name)
            and _is_private(place.lstat())
        )
        if is_ours and (place / MARK).read_text() == _identity(folder):
            return place
    return None


def _parents() -> list[Path]:
    """Parents in which `make` makes a folder and nobody else can replace it."""
    folders = []
    for folder in (_MEMORY, Path(tempfile.gettempdir())):
        facts = folder.stat()
        is_sticky = bool(facts.st_mode & stat.S_ISVTX) or not facts.st_mode & (
            stat.S_IWGRP | stat.S_IWOTH
        )
        if is_sticky and facts.st_uid in (0, os.getuid()):
            folders.append(folder)
    return folders


def _is_private(facts: os.stat_result) -> bool:
    return (
        stat.S_ISDIR(facts.st_mode)
        and stat.S_IMODE(facts.st_mode) == _MODE
        and facts.st_uid == os.getuid()
    )


def _identity(folder: RunFolder) -> str:
    """Of a run folder, wherever it is moved to; a copy has another."""
    facts = folder.path.stat()
    return f"{facts.st_dev}:{facts.st_ino}"


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
