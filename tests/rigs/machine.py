"""What a run may leave on the machine: nothing; here is how that is found out."""

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY = Path("/dev/shm")


def wait_until(holds: Callable[[], object], deadline_s: float = 30.0, what: str = "it") -> None:
    """Look every few milliseconds, until it holds."""
    deadline = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come about within {deadline_s:.0f} s"
        time.sleep(0.01)


def alive(pids: Iterable[int]) -> list[int]:
    """Those that run; a zombie runs no more."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def descendants(pid: int | None = None) -> set[int]:
    """Every process below this one, or below `pid`."""
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


@contextlib.contextmanager
def nothing_left_behind(temporary: Path) -> Iterator[None]:
    """At its end no process has outlived the runs within, and no socket folder or shared memory stands.

    temporary: the folder that the runs make their socket folders in. Orphans come to this process, as it
    makes itself their reaper, so that they are found wherever in the tree they were started.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    before, memory = descendants(), _memory()
    yield
    try:
        wait_until(lambda: not alive(descendants() - before), 5.0, "the end of the run's processes")
    finally:
        for pid in descendants() - before:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, 9)
                os.waitpid(pid, 0)
    assert list(temporary.iterdir()) == []
    assert _memory() <= memory


def _memory() -> set[str]:
    """Names of the engine's shared memory."""
    return {path.name for path in SHARED_MEMORY.glob("dataflow*")} if SHARED_MEMORY.exists() else set()
