"""Who runs in a run folder: one scheduler at most, known by locks that the kernel lets go when
their holders end.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from dataflow.errors import RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.system.files import disk

FILE = "lock"
WORKERS_S = 20.0
"""Seconds for the workers of a killed scheduler to end, which they do by themselves."""


class UnderWay(RunError):
    """The run that a folder belongs to has not ended yet."""


T = TypeVar("T")


@contextlib.contextmanager
def held(
    folder: RunFolder,
    *,
    take: Callable[[], T | None] = lambda: None,
    replaces: bool = False,
    wait_s: float = WORKERS_S,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[T | None]:
    """Be the only scheduler in a run folder, for as long as the block lasts; nobody else has a hand
    in it meanwhile, but the workers of one that has died, where `take` could take them over: what
    it returned is given.

    A lock of this process, which no child inherits, says that the scheduler lives; one of the open
    file, which all that are forked from here inherit, says that some process of the run does. Each
    scheduler that `replaces` another, which may live on for a while, and can do nothing any more,
    locks another byte of the file: that of its number, which stands in it. Errors: UnderWay;
    RunFolderError.
    """
    with disk("locking", folder.path / FILE):
        handle = os.open(folder.path / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        number = _holder(handle)[1] + replaces
        if not _try(lambda file, how: fcntl.lockf(file, how, 1, number), handle):
            raise UnderWay(
                f"'{folder.path.name}' is under way: process {_holder(handle)[0]} runs it; wait"
                " until it has ended, or stop it with Ctrl-C there"
            )
        deadline = clock() + wait_s
        hold = None
        while not _try(fcntl.flock, handle):
            if (hold := take()) is not None:
                break
            if clock() > deadline:
                raise UnderWay(
                    f"'{folder.path.name}' has processes left, which process {_holder(handle)[0]}"
                    f" started, and they have not ended within {wait_s:.0f} s; look for them with"
                    " ps, end them, and try again"
                )
            time.sleep(0.05)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()} {number}".encode(), 0)
        yield hold
    finally:
        os.close(handle)


@contextlib.contextmanager
def nobody_in(folder: RunFolder) -> Iterator[bool]:
    """Whether no process of a run is left, neither its scheduler nor a worker; none comes while the
    block lasts: one that wants to waits. Where it has no lock yet, or none can be had, somebody may
    be in it.
    """
    try:
        handle = os.open(folder.path / FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        yield _try(fcntl.flock, handle)
    finally:
        os.close(handle)


def _try(lock: Callable[[int, int], object], handle: int) -> bool:
    try:
        lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _holder(handle: int) -> tuple[str, int]:
    """The process that leads the run, or did last, and its number among the run's schedulers."""
    pid, _, number = os.pread(handle, 64, 0).decode(errors="replace").partition(" ")
    return pid or "of unknown number", int(number) if number.isdecimal() and number.isascii() else 0
