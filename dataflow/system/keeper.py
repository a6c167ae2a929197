"""Stands between a process and a program that it has started: when that process is gone, so are the
program and all that it has started, at once or some seconds later.

consumes: the end of its parent, the end of its child, END; in a session of its own SIGTERM, too
produces: SIGKILL for every process below it, at any of these; then it ends as its child did
waits for: the next of these
unblocked by: the kernel's signals; at the latest it looks once in LOOK_S

Started by path, as `keeper.py PARENT SECONDS COMMAND...`, with nothing but Python's library. A
program that hangs, in a GPU's kernel or with signals ignored, cannot look after itself; what it has
started becomes this process's child when it dies.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

LOOK_S = 1.0
"""Between two looks at the parent, at most: the signal of its end may come when only a thread of it
has ended."""
PARENT_ENDED, END = signal.SIGUSR1, signal.SIGUSR2
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def keep(parent: int, outlives_s: float, command: list[str]) -> int:
    """Run a command until it ends, or has to; its exit code, negative for a signal."""
    news: set[int] = {PARENT_ENDED, END, signal.SIGCHLD}
    ends: set[int] = {END}
    # in a session of its own nothing reaches it that is meant for others
    if os.getsid(0) == os.getpid():
        news.add(signal.SIGTERM)
        ends.add(signal.SIGTERM)
    else:
        # what they mean is for its parent to decide
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, news)
    _ask(_PR_SET_CHILD_SUBREAPER, 1)
    _ask(_PR_SET_PDEATHSIG, PARENT_ENDED)
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        _become(command, keeper, news)
    for stream in (0, 1):  # streams and files are the program's alone: their end tells of its end
        os.close(stream)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    status, deadline = None, float("inf")
    while status is None:
        if os.getppid() != parent:
            deadline = min(deadline, time.monotonic() + outlives_s)
        if time.monotonic() >= deadline:
            break
        event = signal.sigtimedwait(news, max(0.0, min(LOOK_S, deadline - time.monotonic())))
        if event is not None and event.si_signo in ends:
            break
        status = _reaped(child)
    return _end_all(child, status)


def _become(command: list[str], keeper: int, news: set[int]) -> None:
    try:
        _ask(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, news)
            os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def _reaped(child: int) -> int | None:
    """The exit code of the child, once it has ended; others that have ended are let go of."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if not pid:
            return status
        if pid == child:
            status = os.waitstatus_to_exitcode(ended)


def _end_all(child: int, status: int | None) -> int:
    """Kill what is below this process, generation after generation, until nothing is."""
    while True:
        for pid in _children() or [child] * (status is None):
            os.kill(pid, signal.SIGKILL)  # it is not reaped, so the number is still its own
        try:
            pid, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            return 0 if status is None else status
        if pid == child:
            status = os.waitstatus_to_exitcode(ended)


def _children() -> list[int]:
    """Processes whose parent this one is."""
    children = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(entry.read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
                children.append(int(entry.parent.name))
        except (OSError, IndexError):  # it has gone
            continue
    return children


def _ask(what: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(what, ctypes.c_ulong(value))


def main() -> None:
    """End as the command did."""
    status = keep(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
        os.kill(os.getpid(), -status)
    os._exit(max(0, status))


if __name__ == "__main__":
    main()
