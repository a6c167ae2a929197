"""What runs leave in memory that were killed with all their processes: found by their folders, and removed."""

import contextlib
import os
import shutil
import stat
from pathlib import Path

from dataflow import command
from dataflow.desk import PREFIX
from dataflow.errors import RunError
from dataflow.run_folder import RunFolder
from dataflow.run_lock import nobody_in


def clear(folder: RunFolder) -> bool:
    """Remove the sockets and the shared memory of a run if no process of it is left; whether there were any.

    A run that lives is never touched, nor one whose workers wait for another scheduler.
    """
    with nobody_in(folder) as nobody:
        return nobody and remove(folder)


def clear_all(runs: Path) -> list[str]:
    """Remove them of every run below a folder; the names of those that had any."""
    found = [RunFolder(path.parent) for path in sorted(runs.glob(f"*/{command.FILE}")) if not path.parent.is_symlink()]
    return [folder.path.name for folder in found if clear(folder)]


def remove(folder: RunFolder) -> bool:
    """As `clear`, for one who knows that nobody is in the folder."""
    place = _place(folder)
    if place is None or any(command.listens(path) for path in place.iterdir()):
        return False
    shutil.rmtree(place, ignore_errors=True)
    return True


def _place(folder: RunFolder) -> Path | None:
    """Where a run has, or had, its sockets: a folder of this user with the name that runs give."""
    with contextlib.suppress(RunError, OSError, AttributeError):
        address = str(folder.read_json(command.FILE).get("address", ""))
        place = Path(address.removeprefix("ipc://")).parent
        facts = place.lstat()
        if place.name.startswith(PREFIX) and stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid():
            return place
    return None
