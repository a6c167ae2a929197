"""A child process: how one is started, dies with its parent, is waited for and ended, with all that
it has started. With `channel.Channel.pair` it is spoken to.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

from dataflow.errors import RunError
from dataflow.system import forking
from dataflow.system.keeper import END

ROOT = Path(__file__).resolve().parents[2]
"""Where a Python of its own finds this project."""
_KEEPER = Path(__file__).with_name("keeper.py")
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.002
KILL_S = 5.0
"""For the end of a process that was killed."""
LAST_BYTES = 2000
"""Of what it has printed that an error shows."""


class Child:
    """A process that this one has started: a fork, or a program.

    Its end takes along what it leaves behind: its process group where it leads one, all that it has
    started where a keeper stands in between. Every wait has a deadline, but that of whoever exists
    to see it end.

    consumes: the kernel's word of its end; what it says last, where `words` are kept
    produces: signals to it; its exit status, once it has been seen
    waits for: its end, up to a deadline
    unblocked by: its end
    """

    host = ""
    """Where it is; empty: here."""

    def __init__(
        self,
        pid: int,
        *,
        leads: bool = False,
        has_keeper: bool = False,
        program: "subprocess.Popen[Any] | None" = None,
        words: IO[bytes] | None = None,
    ) -> None:
        """leads: it has a process group of its own, whose rest is killed before its end is told.
        has_keeper: `pid` is its keeper's. words: the file that has what it prints.
        """
        self.pid, self.returncode = pid, None
        self._leads, self._has_keeper, self._program = leads, has_keeper, program
        self._words_file, self._words = words, ""

    returncode: int | None
    """Its exit status; minus a signal's number; None while nobody has seen its end."""

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        if self.returncode is None:
            try:
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return None
                if self._leads:  # until it is reaped its number is nobody else's
                    _signal(os.killpg, self.pid, signal.SIGKILL)
                self.returncode = (
                    os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                    if self._program is None
                    else self._program.wait(KILL_S)
                )
            except ChildProcessError:  # somebody else has taken it
                self.returncode = 0
            self._words = self.last_words
            if self._words_file is not None:
                self._words_file.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if timeout is None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_LOOK_S)
        return status

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal, unless its end has been seen; to its group, or to it alone where it has
        none yet.
        """
        if self.returncode is None and not (group and _signal(os.killpg, self.pid, number)):
            _signal(os.kill, self.pid, number)

    def kill(self) -> None:
        """End it by force, with its group where it leads one, or all that it has started where it
        has a keeper; nothing where its end has been seen.
        """
        if self.poll() is not None:
            return
        if self._has_keeper:
            self.signal(END)
            self.signal(signal.SIGCONT)
        else:
            self.signal(signal.SIGKILL, group=self._leads)

    def change(self) -> Literal["stopped", "continued"] | None:
        """What a signal has done to it since the last look."""
        with contextlib.suppress(ChildProcessError):
            news = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            if news is not None:
                return "stopped" if news.si_code == os.CLD_STOPPED else "continued"
        return None

    def let_go_on(self) -> None:
        """Let it go on where it was stopped since the last look: nobody knows whether whoever
        stopped it comes back.
        """
        if self.change() == "stopped":
            self.signal(signal.SIGCONT)

    def ended_within(self, seconds: float) -> bool:
        """Whether it ends by itself in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(max(0.0, seconds))
            return True
        return False

    def end(self, within_s: float) -> int:
        """Wait for it, as it was asked to end, and kill it when the time is over; its exit status.
        One that hangs in the kernel is left to it.
        """
        if not self.ended_within(within_s):
            self.kill()
            if not self.ended_within(KILL_S) and self._has_keeper:  # which hangs, too
                self.signal(signal.SIGKILL, group=self._leads)
                self.ended_within(KILL_S)
        return -signal.SIGKILL if self.returncode is None else self.returncode

    @property
    def state(self) -> str:
        """How it is, for the middle of a sentence.

        >>> child = fork(lambda: 3)
        >>> child.wait(60.0)
        3
        >>> child.state
        'ended with status 3'
        """
        status = self.poll()
        return "is still running" if status is None else describe_status(status)

    @property
    def last_words(self) -> str:
        """The end of what it has printed; empty where that is not kept."""
        file = self._words_file
        if file is None or file.closed:
            return self._words
        size = file.seek(0, os.SEEK_END)
        data = os.pread(file.fileno(), LAST_BYTES, max(0, size - LAST_BYTES))
        return data.decode("utf-8", "replace").strip()


def fork(
    body: Callable[[], int],
    *,
    leads: bool = False,
    keep: Sequence[int] | None = None,
    ends_with_parent: int = 0,
) -> Child:
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
    return Child(pid, leads=leads)


def program(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    **given: Any,
) -> Child:
    """python -m MODULE ARGUMENTS [FD of `end`]: a fresh process that finds this project. prefix: a
    command that is to run it. `given` is for `started`.
    """
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return started(
        [*prefix, sys.executable, "-P", "-m", module, *arguments],
        environment={**os.environ, **(environment or {}), "PYTHONPATH": paths},
        **given,
    )


def started(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    end: socket.socket | None = None,
    keep: Sequence[int] = (),
    leads: bool = False,
    outlives_s: float | None = None,
    words: bool = False,
    **given: Any,
) -> Child:
    """COMMAND [FD of `end`]: a process with this environment and no other, and the open files
    `keep`.

    leads: in a process group of its own, which ends with it. outlives_s: a keeper stands in
    between, with which all that it has started ends: when it does, at `kill`, and so many seconds
    after this process. words: what it prints is kept for `Child.last_words`,
    but for streams of `given`, which is for Popen.
    """
    files = [] if end is None else [end.fileno()]
    if outlives_s is not None:
        command = below_keeper(command, outlives_s)
    printed = tempfile.TemporaryFile() if words else None  # noqa: SIM115
    if printed is not None:
        given = {"stdout": printed, "stderr": printed, **given}
    if leads:
        given["process_group"] = 0
    process = subprocess.Popen(
        [*command, *map(str, files)], pass_fds=[*files, *keep], env=dict(environment), **given
    )
    return Child(
        process.pid,
        leads=leads,
        has_keeper=outlives_s is not None,
        program=process,
        words=printed,
    )


def below_keeper(command: Sequence[str], outlives_s: float = 0.0) -> list[str]:
    """The command that runs COMMAND below a keeper, which ends it with all that it has started: so
    many seconds after this process, at `keeper.END`, and, in a session of its own, at SIGTERM.
    Streams and exit status are those of COMMAND.
    """
    parent = str(os.getpid())
    return [sys.executable, "-I", "-S", str(_KEEPER), parent, str(outlives_s), *command]


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
    for number in [int(file.name) for file in Path("/dev/fd").iterdir()]:
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
