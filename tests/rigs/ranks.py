"""Processes of a worker: itself, and the other ranks, which it has started."""

from pathlib import Path

import psutil


def ranks_of(worker: str = "trainer") -> list[int]:
    """Process ids of the other ranks of a worker of this process's run, in their order: those that
    have its log as their output, and whose parent has it too.
    """
    return processes_of(worker)[1:]


def processes_of(worker: str) -> list[int]:
    """The worker itself, its first rank, before the others; empty while it is not there."""
    first, others = [], []
    for process in psutil.Process().children(recursive=True):
        try:
            if _log(process).endswith(f"{worker}-0.log"):
                (others if _log(process.parent()) == _log(process) else first).append(process.pid)
        except (psutil.Error, OSError):
            continue
    return [*first, *sorted(others)] if len(first) == 1 else []


def _log(process: psutil.Process | None) -> str:
    return "" if process is None else str(Path(f"/proc/{process.pid}/fd/2").readlink())
