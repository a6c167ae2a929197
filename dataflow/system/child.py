"""A child process: how one is started, dies with its parent, is waited for and ended, with all that
it started.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

from dataflow.errors import RunError
from dataflow.system import forking

ROOT = Path(__file__).resolve().parents[2]
"""Where a Python of its own finds this project."""
_KEEPER = Path(__file__).with_name("keeper.py")
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.002


class Child(Protocol):
    """A child of this process, as subprocess.Popen shows it."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """Its exit status; minus a signal's number; None while `wait` and `poll` have not seen its
        end.
        """

    def poll(self) -> int | None:
        """The exit status, if it has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""

    def kill(self) -> None:
        """SIGKILL, unless its end has been seen."""


class Forked:
    """A fork of this process."""

    def __init__(self, pid: int, *, leads: bool = False) -> None:
        """leads: it has a process group of its own, whose rest is killed before its end is told."""
        self.pid, self._leads = pid, leads
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        if self.returncode is None:
            try:
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return None
                if self._leads:  # until it is reaped its number is nobody else's
                    _signal(os.killpg, self.pid, signal.SIGKILL)
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:  # somebody else has taken it
                self.returncode = 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if timeout is None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(_LOOK_S)
        return status

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal, unless its end has been seen; to its group, or to it alone where it has
        none yet.
        """
        if self.returncode is None and not (group and _signal(os.killpg, self.pid, number)):
            _signal(os.kill, self.pid, number)

    def kill(self) -> None:
        """SIGKILL, unless its end has been seen; with its group where it leads one."""
        if self.poll() is None:
            self.signal(signal.SIGKILL, group=self._leads)

    def change(self) -> Literal["stopped", "continued"] | None:
        """What a signal has done to it since the last look."""
        return _change(self.pid)


def fork(
    body: Callable[[], int],
    *,
    leads: bool = False,
    keep: Sequence[int] | None = None,
    ends_with_parent: int = 0,
) -> Forked:
    """A fork that runs `body`, whose result is its exit status; it never returns into the caller's
    code.

    leads: in a process group of its own. keep: it has none of the caller's open files but these,
    and streams of its own; None: it has all. ends_with_parent: the signal that the kernel sends it
    when its parent ends; 0: none.
    """
    parent = os.getpid()

    def run() -> int:
        if leads:
            os.setpgid(0, 0)
        if ends_with_parent:
            die_with_parent(ends_with_parent)
            if os.getppid() != parent:
                return 1
        if keep is not None:
            let_go_of_files((0, 1, 2, *keep))
            _open_streams()
        return body()

    pid = forking.fork()
    if pid == 0:
        run_forever(run)
    if leads:
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
    return Forked(pid, leads=leads)


def program(
    module: str,
    *arguments: str,
    end: socket.socket | None = None,
    keep: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    **given: Any,
) -> "subprocess.Popen[Any]":
    """python -m MODULE ARGUMENTS [FD of `end`]: a fresh process that finds this project, and has
    the open files `keep`; prefix: a command that is to run it. `given` is for Popen.
    """
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return started(
        [*prefix, sys.executable, "-P", "-m", module, *arguments],
        end=end,
        keep=keep,
        environment={**os.environ, **(environment or {}), "PYTHONPATH": paths},
        **given,
    )


def started(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    end: socket.socket | None = None,
    keep: Sequence[int] = (),
    **given: Any,
) -> "subprocess.Popen[Any]":
    """COMMAND [FD of `end`]: a process with this environment and no other, and the open files
    `keep`. `given` is for Popen.
    """
    files = [] if end is None else [end.fileno()]
    return subprocess.Popen(
        [*command, *map(str, files)], pass_fds=[*files, *keep], env=dict(environment), **given
    )


def let_go_on(child: Child) -> None:
    """Let a child go on that was stopped since the last look: nobody knows whether whoever stopped
    it comes back.
    """
    if _change(child.pid) == "stopped":
        _signal(os.kill, child.pid, signal.SIGCONT)


def below_keeper(command: Sequence[str]) -> list[str]:
    """The command that runs COMMAND below a keeper, which ends it with all that it has started:
    when this process ends, at `keeper.END`, and, in a session of its own, at SIGTERM. Streams and
    exit status are those of COMMAND.
    """
    return [sys.executable, "-I", "-S", str(_KEEPER), str(os.getpid()), *command]


def ended_within(child: Child, seconds: float) -> bool:
    """Whether a child that was asked to end does so in time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(max(0.0, seconds))
        return True
    return False


def end(child: Child, within_s: float) -> int:
    """Wait for a child that was asked to end, and kill it when the time is over; its exit
    status.
    """
    if not ended_within(child, within_s):
        child.kill()
    return child.wait()


def describe_status(status: int) -> str:
    """How a process ended, by its exit status."""
    return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def refuse_used_cuda(what: str, do: str) -> None:
    """Raise RunError where this process has used CUDA, which no fork of it can use again."""
    if forking.has_used_cuda():
        raise RunError(
            f"{what} cannot be forked from a process that has used CUDA; found it initialised; {do}"
        )


def run_forever(body: Callable[[], int]) -> NoReturn:
    """Run in a forked child and never return into the parent's code."""
    status = 1
    try:
        status = body()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _change(pid: int) -> Literal["stopped", "continued"] | None:
    with contextlib.suppress(ChildProcessError):
        found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        if found is not None:
            return "stopped" if found.si_code == os.CLD_STOPPED else "continued"
    return None


def _signal(send: Callable[[int, int], None], whom: int, number: int) -> bool:
    """Whether there was somebody to take it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(whom, number)
        return True
    return False


def let_go_of_files(keep: Sequence[int]) -> None:
    """In a fork, close what the parent has open, but for these. The numbers stay taken: an
    inherited object that still writes to one (a log handler) would else write into the next socket
    that gets it.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in [int(each.name) for each in Path("/dev/fd").iterdir()]:
        if number not in (*keep, nothing):
            with contextlib.suppress(OSError):
                os.fstat(number)
                os.dup2(nothing, number, inheritable=False)


def _open_streams() -> None:
    """Standard streams without the parent's buffers and locks; prints go where the parent's go."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(nothing, number)
    os.dup2(nothing, 0)
    if nothing > 2:
        os.close(nothing)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
