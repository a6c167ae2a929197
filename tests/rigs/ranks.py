"""Processes that a trainer's worker forked."""

from pathlib import Path

import psutil


def ranks_of(worker: str = "trainer") -> list[int]:
    """Process ids of the other ranks of a worker of this process's run: those that have its log as their output, and
    whose parent has it too."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if _log(process).endswith(f"{worker}-0.log") and _log(process.parent()) == _log(process):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def _log(process: psutil.Process | None) -> str:
    return "" if process is None else str(Path(f"/proc/{process.pid}/fd/2").readlink())
