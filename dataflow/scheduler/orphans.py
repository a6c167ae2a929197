"""What runs leave in memory that were killed with all their processes: found by their folders, and removed."""

import shutil
from pathlib import Path

from dataflow.folder import socket_folder
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.run_lock import nobody_in
from dataflow.scheduler.requests import listens


def clear(folder: RunFolder) -> bool:
    """Remove the sockets and the shared memory of a run if no process of it is left; whether there were any.

    A run that lives is never touched, nor one whose workers wait for another scheduler.
    """
    with nobody_in(folder) as nobody:
        return nobody and remove(folder)


def clear_all(runs: Path) -> list[str]:
    """Remove them of every run below a folder; the names of those that had any."""
    found = [
        RunFolder(path.parent)
        for path in sorted(runs.glob(f"*/{socket_folder.CONTROL}"))
        if not path.parent.is_symlink()
    ]
    return [folder.path.name for folder in found if clear(folder)]


def remove(folder: RunFolder) -> bool:
    """As `clear`, for one who knows that nobody is in the folder."""
    place = socket_folder.of(folder)
    if place is None or any(listens(path) for path in place.iterdir()):
        return False
    shutil.rmtree(place, ignore_errors=True)
    return True
