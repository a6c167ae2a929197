"""How rank 0 starts another rank: as a program of its own, or as a fork that inherits what cannot be sent."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

from dataflow.errors import RunError
from dataflow.scheduler.forkserver import die_with_parent, run_forever
from dataflow.system import forking

_ROOT = Path(__file__).resolve().parents[2]
_LOOK_S = 0.005


class Process(Protocol):
    """A rank's process, as subprocess.Popen shows it."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """Its exit status; minus a signal's number; None while `wait` and `poll` have not seen its end."""

    def poll(self) -> int | None:
        """The exit status, if it has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""

    def kill(self) -> None:
        """SIGKILL, unless its end has been seen."""


Start = Callable[[socket.socket, int], Process]
"""Starts a rank of this number that talks over this end of a socket pair."""


def program(module: str) -> Start:
    """python -m MODULE FD: a fresh process, which may use CUDA whatever this one has done."""

    def start(end: socket.socket, rank: int) -> Process:
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", ""))))
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(end.fileno())],
            stdin=subprocess.DEVNULL, pass_fds=(end.fileno(),), env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip

    return start


def fork(main: Callable[[int, int], int]) -> Start:
    """A fork that runs main(FD, rank): the user's functions reach it by inheritance, as they reach the workers.

    To be started before this process has used a GPU. It ends with its parent.
    """

    def start(end: socket.socket, rank: int) -> Process:
        _refuse_used_cuda()
        parent = os.getpid()
        pid = forking.fork()
        if pid == 0:
            _become(main, end.fileno(), rank, parent)
        return Forked(pid)

    return start


class Forked:
    """A child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        if self.returncode is None:
            try:
                found, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has taken it
                found, status = self.pid, 0
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(_LOOK_S)
        return status

    def kill(self) -> None:
        """SIGKILL, unless its end has been seen."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _become(main: Callable[[int, int], int], end: int, rank: int, parent: int) -> NoReturn:
    """Be that rank, in a forked child, and never return into the parent's code; its open files stay the parent's."""

    def body() -> int:
        die_with_parent()
        if os.getppid() != parent:
            return 1
        _let_go_of_files(keep=end)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.enable()
        return main(end, rank)

    run_forever(body)


def _let_go_of_files(keep: int) -> None:
    """Close what the parent has open, but for its streams and `keep`. The numbers stay taken: an inherited object that
    still writes to one (a log handler) would else write into the next socket that gets it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in [int(each.name) for each in Path("/dev/fd").iterdir()]:
        if number > 2 and number not in (keep, nothing):
            with contextlib.suppress(OSError):
                os.fstat(number)
                os.dup2(nothing, number, inheritable=False)


def _refuse_used_cuda() -> None:
    if forking.has_used_cuda():
        raise RunError(
            "a rank cannot be forked from a process that has used CUDA; found it initialised; run the graph in "
            "processes, or make the ranks before anything touches the GPU"
        )
