"""Finds and removes what killed runs leave in memory, by their folders."""

import contextlib
import shutil
from pathlib import Path

from dataflow.errors import RunError
from dataflow.folder import socket_folder
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.run_lock import nobody_in
from dataflow.folder.snapshot import read
from dataflow.history.resume import TIMES
from dataflow.scheduler.requests import listens
from dataflow.worker.kept_counts import KeptFiles, known_edges, total


def clear(folder: RunFolder) -> bool:
    """Remove the sockets and the shared memory of a run if no process of it is left; whether there
    were any.

    A run that lives is never touched, nor one whose workers wait for another scheduler.
    """
    with nobody_in(folder) as nobody:
        return nobody and remove(folder)


def clear_all(runs: Path) -> list[str]:
    """Remove them of every run below a folder; the names of those that had any."""
    folders = [
        RunFolder(path.parent)
        for path in sorted(runs.glob(f"*/{socket_folder.CONTROL}"))
        if not path.parent.is_symlink()
    ]
    return [folder.path.name for folder in folders if clear(folder)]


def remove(folder: RunFolder) -> bool:
    """As `clear`, for a caller who knows that no process is in the folder; the workers' counts go
    to times.json, which the scheduler wrote some seconds before.
    """
    place = socket_folder.of(folder)
    if place is None or any(listens(path) for path in place.iterdir()):
        return False
    with contextlib.suppress(RunError):
        _keep_counts(folder, place)
    shutil.rmtree(place, ignore_errors=True)
    return True


def _keep_counts(folder: RunFolder, place: Path) -> None:
    """Errors: RunError where nothing says what had been counted before this part of the run."""
    before = read(place).get("begun")
    with KeptFiles([place]) as files:
        counted = files.read()
    if isinstance(before, dict) and counted:
        edges = total([{"before": known_edges(before.get("edges"))}, counted])
        folder.write_json("times.json", {**folder.read_json("times.json", TIMES), "edges": edges})
