"""Strikes the processes of a run from outside: which there are is read from /proc alone, nothing of
the run helps.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
POLL_S = 0.02
NOTICED_WITHIN_S = 90.0
"""A process of a scorer's pool that is not replaced by then was not needed."""


@dataclass
class Blow:
    """One signal to one process."""

    at: float
    """Seconds since 1970."""
    target: str
    """The worker's name; `reward-0/process` for one of its scorer's processes."""
    sent: str
    """SIGKILL or SIGSTOP."""
    replaced_s: float | None = None
    """For a scorer's process: until another had taken its place, or the stopped one went on."""

    @property
    def worker(self) -> str:
        """The worker that it is, or belongs to."""
        return self.target.partition("/")[0]

    @property
    def is_within(self) -> bool:
        """Whether it hit a scorer's process, which its worker replaces by itself."""
        return "/" in self.target


def workers(scheduler: int) -> dict[str, psutil.Process]:
    """The workers of a run by name: those below its forkserver whose output goes to a log."""
    by_name = {}
    with contextlib.suppress(psutil.Error):
        for forkserver in psutil.Process(scheduler).children():
            with contextlib.suppress(psutil.Error):
                for process in forkserver.children():
                    if name := _log_of(process.pid):
                        by_name[name] = process
    return by_name


def everyone(scheduler: int) -> list[psutil.Process]:
    """The scheduler and all that it started."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(scheduler)
        return [process, *process.children(recursive=True)]
    return []


def targets(scheduler: int) -> dict[str, list[psutil.Process]]:
    """What may be struck, by name: the workers, and what belongs to the pool of each, together
    under one name.
    """
    by_name = {}
    for name, process in workers(scheduler).items():
        by_name[name] = [process]
        with contextlib.suppress(psutil.Error):
            if below := process.children(recursive=True):
                by_name[f"{name}/process"] = sorted(below, key=lambda process: process.pid)
    return by_name


class Nemesis:
    """Sends a signal to a process of a run every so many seconds.

    consumes: a seed; the processes that are there when a blow is due
    produces: signals; `blows`, in order
    waits for: the time of the next blow
    unblocked by: the clock, or `stop`
    """

    def __init__(self, scheduler: int, seed: int, every_s: float) -> None:
        """scheduler: pid of the run's first process."""
        self.blows: list[Blow] = []
        self._scheduler, self._every_s = scheduler, every_s
        self._draw = random.Random(seed)
        self._over = threading.Event()
        self._striker = threading.Thread(target=self._strike_on, daemon=True)

    def start(self) -> None:
        """Begin; the first blow falls after one interval."""
        self._striker.start()

    def stop(self) -> None:
        """No blow falls after this; whether the last ones were mended is still looked after."""
        self._over.set()
        self._striker.join()

    def lot(self) -> tuple[signal.Signals, float, float]:
        """The next signal, and two numbers from 0 to 1 that say whose it is: the name, and the
        process of that name.
        """
        return self._draw.choice(SIGNALS), self._draw.random(), self._draw.random()

    def _strike_on(self) -> None:
        due = time.monotonic()
        while True:
            due += self._every_s
            if self._over.wait(max(0.0, due - time.monotonic())):
                return
            self._strike()

    def _strike(self) -> None:
        number, place, among = self.lot()
        candidates = targets(self._scheduler)
        if not candidates:
            return
        names = sorted(candidates)
        name = names[int(place * len(names))]
        process = candidates[name][int(among * len(candidates[name]))]
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            before = _children(parent)
            process.send_signal(number)
            blow = Blow(time.time(), name, number.name)
            self.blows.append(blow)
            print(f"{number.name} to {name}", flush=True)
            if blow.is_within and parent is not None:
                threading.Thread(
                    target=_watch, args=(blow, process, parent, before), daemon=True
                ).start()


def _watch(blow: Blow, struck: psutil.Process, parent: psutil.Process, before: set[int]) -> None:
    """Note when a process of a pool was replaced, the pool's server with all below it, or goes on;
    until its parent ends.
    """
    deadline = time.monotonic() + NOTICED_WITHIN_S
    while time.monotonic() < deadline and parent.is_running():
        is_replaced = not _runs(struck) and _children(parent) - before
        if is_replaced or (blow.sent == signal.SIGSTOP.name and _goes_on(struck)):
            blow.replaced_s = time.time() - blow.at
            return
        time.sleep(POLL_S)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _goes_on(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return False


def _children(process: psutil.Process | None) -> set[int]:
    with contextlib.suppress(psutil.Error):
        return {child.pid for child in process.children()} if process is not None else set()
    return set()


def _log_of(pid: int) -> str:
    """The worker's name, from the log that its output goes to; empty for any other process."""
    with contextlib.suppress(OSError):
        log = Path(f"/proc/{pid}/fd/1").readlink()
        if log.suffix == ".log" and log.parent.name == "logs" and log.stem != "forkserver":
            return log.stem
    return ""
