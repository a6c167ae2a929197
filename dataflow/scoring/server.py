"""The small server that forks a pool's processes: one thread, so that forking is always safe."""

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from pathlib import Path

from dataflow.scoring.calls import Settings, make_calls
from dataflow.system.forking import fork

ORDER = struct.Struct("<Bi")  # what, which process
REPLY = struct.Struct("<Bii")  # what, which process, pid or wait status
SPAWN, END, LOST = 1, 2, 3
ALIVE = -1  # wait status of a process that was lost and had not ended
LANE_WORDS = 3
_LOOK_S = 1.0
_LAST_BREATH_S = 0.1
_RESERVE_MB = 1536
_PR_SET_PDEATHSIG = 1


def start_server(progress: memoryview, settings: Settings) -> tuple[socket.socket, int]:
    """Fork the server; our end of its control socket, and its pid."""
    ours, theirs = socket.socketpair()
    owner = os.getpid()
    pid = fork()
    if pid == 0:
        try:
            _go_quiet()
            _wake_with(owner)
            _close_all_but(theirs.fileno())
            _serve(theirs, owner, progress, settings)
        finally:
            os._exit(1)
    theirs.close()
    return ours, pid


def _serve(control: socket.socket, owner: int, progress: memoryview, settings: Settings) -> None:
    """Fork and end processes as told; never returns.

    consumes: orders to spawn a process (with its socket), to end one, or to say how a lost one ended
    produces: a reply to each, with its pid or its wait status
    waits for: an order, looking every second whether the owner still lives, and whether somebody stopped a process
    unblocked by: an order, or the end of the owner
    """
    pids: dict[int, int] = {}
    try:
        while True:
            if not select.select([control], [], [], _LOOK_S)[0]:
                if os.getppid() != owner:
                    break
                for pid in pids.values():
                    let_go_on(pid)
                continue
            message, fds, _, _ = socket.recv_fds(control, ORDER.size, 1)
            if len(message) < ORDER.size:
                break
            what, number = ORDER.unpack(message)
            if what == SPAWN:
                pids[number] = _spawn(fds[0], number, progress, settings)
                os.close(fds[0])
                control.sendall(REPLY.pack(SPAWN, number, pids[number]))
            else:
                pid = pids.pop(number)
                status = _end(pid) if what == END else _bury_lost(pid)
                control.sendall(REPLY.pack(END, number, status))
    except OSError:
        pass
    finally:
        for pid in pids.values():
            _end(pid)
        os._exit(0)


def _spawn(fd: int, number: int, progress: memoryview, settings: Settings) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        _close_all_but(fd)
        _die_with(server)
        _limit_memory(settings.memory_mb)
        _fresh_streams()
        width = settings.concurrency * LANE_WORDS
        starts = range(number * width, (number + 1) * width, LANE_WORDS)
        lanes = [progress[start : start + LANE_WORDS] for start in starts]
        make_calls(socket.socket(fileno=fd), lanes, settings)
    except (OSError, EOFError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def let_go_on(pid: int) -> None:
    """Let a child go on that was stopped since the last look: nobody knows whether whoever stopped it comes back."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        if os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG) is not None:
            os.kill(pid, signal.SIGCONT)


def _end(pid: int) -> int:
    """Kill a process with all that it started, unless it has ended by itself; its wait status."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _bury_lost(pid: int) -> int:
    """The wait status of a process whose wire was closed; ALIVE when it did that and lived on until now."""
    deadline = time.monotonic() + _LAST_BREATH_S
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return _end(pid)
        time.sleep(0.001)
    _end(pid)
    return ALIVE


def _go_quiet() -> None:
    """Out of the terminal's group, deaf to Ctrl-C, and without the worker's handlers."""
    with contextlib.suppress(OSError):
        os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def _close_all_but(kept: int) -> None:
    """Close what was inherited, so that no peer of the owner sees a socket live on here."""
    folders = [Path("/proc/self/fd"), Path("/dev/fd")]
    folder = next(folder for folder in folders if folder.is_dir())
    for fd in [int(path.name) for path in folder.iterdir()]:
        if fd > 2 and fd != kept:
            with contextlib.suppress(OSError):
                os.close(fd)


def _wake_with(owner: int) -> None:
    """Have the kernel let this process go on when its owner ends: one that was stopped could not clean up."""
    _ask_at_end_of_parent(signal.SIGCONT)
    if os.getppid() != owner:
        os._exit(0)


def _ask_at_end_of_parent(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _die_with(server: int) -> None:
    _ask_at_end_of_parent(signal.SIGKILL)
    if os.getppid() != server:
        os._exit(0)


def _limit_memory(memory_mb: int | None) -> None:
    """A wall some way behind the limit that the owner keeps: allocators reserve more than they use."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb is None or sys.platform != "linux":
        return
    with Path("/proc/self/status").open() as status:
        used_kb = next((int(line.split()[1]) for line in status if line.startswith("VmData:")), 0)
    limit = (used_kb << 10) + ((memory_mb + _RESERVE_MB) << 20)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _fresh_streams() -> None:
    """Standard streams without the owner's buffers and locks; prints go where the worker's go."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.dup2(null, fd)
    os.dup2(null, 0)
    if null > 2:
        os.close(null)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False, errors="backslashreplace")
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
