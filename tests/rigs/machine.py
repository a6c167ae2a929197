"""What a run may leave on the machine: nothing; here is how that is found out."""

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

_PR_SET_CHILD_SUBREAPER = 36


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


def folders_made(record: Callable[[Path], object]) -> Callable[..., str]:
    """A stand-in for tempfile.mkdtemp that tells of every folder of a run, for sockets and shared
    memory.
    """
    make = tempfile.mkdtemp

    def mkdtemp(*args: Any, **kwargs: Any) -> str:
        made = make(*args, **kwargs)
        if Path(made).name.startswith("dataflow"):
            record(Path(made))
        return made

    return mkdtemp


@contextlib.contextmanager
def nothing_left_behind(folders: Iterable[Path]) -> Iterator[None]:
    """At its end no process has outlived the runs within, and none of their folders stands.

    Orphans come to this process, as it makes itself their reaper: so they are found wherever they
    were started.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    before = descendants()
    yield
    try:
        wait_until(lambda: not alive(descendants() - before), 5.0, "the end of the run's processes")
    finally:
        for pid in descendants() - before:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    assert [folder for folder in folders if folder.exists()] == []
