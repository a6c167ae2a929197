"""Starts programs, bounds them, and ends them with all that they started; a process of its own that
imports nothing.

python program_host.py FOLDER [MODULE ...] FD: FD is a socket on which the owner says, a line of
JSON each, {"start": number, "argv": [...], "env": {...}, "without": [names], "marker": text of its
environment that no other has, "input": text, "memory_mb": n or null, "output_bytes": n} and {"end":
number}, and hears {"ended": number, "status": n, "last": last line of its output, "errors": the end
of what it said on stderr, "is_too_much": whether it said more than it may}. MODULE: imported here,
from FOLDER too where that is not empty; Python programs are forks of this process then, which have
them. Before anything starts the owner hears {"importing": MODULE} of each, and {"ready": true}; or
{"failed": MODULE, "error": why}, and this process ends. When the owner ends, so does all.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import resource
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

GRACE_S = 1.0
"""Between SIGTERM and SIGKILL."""
LAST_BYTES = 1 << 16
"""Of the end of its output that are kept."""
ERROR_BYTES = 1 << 11
"""Of what it says on stderr."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_S = 0.2


class RunningProgram:
    """One of them."""

    def __init__(self, number: int, pid: int, marker: bytes, output_bytes: int) -> None:
        self.number, self.pid, self.marker, self.left = number, pid, marker, output_bytes
        self.output, self.errors = bytearray(), bytearray()
        self.open: set[int] = set()
        self.kill_at: float | None = None
        self.is_too_much = False

    def signal(self, number: int) -> None:
        """To its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def stop(self) -> None:
        """Ask it to end, and see to it that it does."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + GRACE_S
            self.signal(signal.SIGTERM)

    def read(self, file: int, is_error: bool) -> bool | None:
        """Read from a stream. False: it has ended. None: nothing to read yet."""
        try:
            piece = os.read(file, 1 << 16)
        except BlockingIOError:
            return None
        tail, most = (self.errors, ERROR_BYTES) if is_error else (self.output, LAST_BYTES)
        tail += piece
        del tail[: max(0, len(tail) - most)]
        self.left -= len(piece)
        if self.left < 0 and not self.is_too_much:
            self.is_too_much = True
            self.kill_at = time.monotonic()
            self.signal(signal.SIGKILL)
        return bool(piece)

    def told(self, status: int) -> dict[str, Any]:
        """The message to the owner about its end."""
        lines = [
            line for line in self.output.decode("utf-8", "replace").splitlines() if line.strip()
        ]
        return {
            "ended": self.number,
            "status": status,
            "last": lines[-1].strip() if lines else "",
            "errors": self.errors.decode("utf-8", "replace"),
            "is_too_much": self.is_too_much,
        }


class ProgramHost:
    """Runs programs until its owner is gone.

    consumes: orders of the owner; what programs say; ends of children
    produces: a line to the owner for each program that has ended, after all that it had started
    waits for: any of these, and the time after which a program that was asked to end is killed
    unblocked by: the same
    """

    def __init__(self, owner: socket.socket, *, forks: bool) -> None:
        self._owner, self._forks = owner, forks
        self._inbox, self._outbox = b"", b""
        self._running: dict[int, RunningProgram] = {}
        self._selector = selectors.DefaultSelector()
        owner.setblocking(False)
        self._selector.register(owner, selectors.EVENT_READ, None)
        self._woken, wakes = socket.socketpair()
        self._woken.setblocking(False)
        wakes.setblocking(False)
        self._wakes = wakes
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._woken, selectors.EVENT_READ, self)

    def serve(self) -> None:
        """Until the owner is gone."""
        try:
            while True:
                for key, events in self._selector.select(_LOOK_S if self._ending() else None):
                    if key.data is None:
                        if events & selectors.EVENT_READ and not self._hear():
                            return
                        self._send(b"")
                    elif key.data is self:
                        with contextlib.suppress(BlockingIOError):
                            self._woken.recv(1 << 12)
                    else:
                        self._read(key.data, key.fd)
                self._kill_late()
                self._reap()
        except (OSError, EOFError, ValueError):
            return
        finally:
            self._end_all()

    def _ending(self) -> bool:
        return any(program.kill_at is not None for program in self._running.values())

    def _hear(self) -> bool:
        piece = self._owner.recv(1 << 16)
        *lines, self._inbox = (self._inbox + piece).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "start" in order:
                self._start(order)
            elif order["end"] in self._running:
                self._running[order["end"]].stop()
        return bool(piece)

    def _send(self, data: bytes) -> None:
        self._outbox += data
        if self._outbox:
            with contextlib.suppress(BlockingIOError):
                self._outbox = self._outbox[self._owner.send(self._outbox) :]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        self._selector.modify(self._owner, events, None)

    def _start(self, order: dict[str, Any]) -> None:
        with tempfile.TemporaryFile() as stdin:
            stdin.write(order["input"].encode())
            stdin.seek(0)
            out, theirs_out = os.pipe()
            err, theirs_err = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._become(order, stdin.fileno(), theirs_out, theirs_err)
            os.close(theirs_out)
            os.close(theirs_err)
        program = RunningProgram(
            order["start"], pid, order["marker"].encode(), order["output_bytes"]
        )
        self._running[program.number] = program
        for file, is_error in ((out, False), (err, True)):
            os.set_blocking(file, False)
            program.open.add(file)
            self._selector.register(file, selectors.EVENT_READ, (program, is_error))

    def _become(self, order: dict[str, Any], stdin: int, out: int, err: int) -> None:
        """In the fork: be the program. Never returns."""
        status = 127
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            for file, standard in ((stdin, 0), (out, 1), (err, 2)):
                os.dup2(file, standard)
            _limit_memory(order["memory_mb"], forked=self._forks)
            for name in order["without"]:
                os.environ.pop(name, None)
            os.environ.update(order["env"])
            if self._forks:
                os.closerange(3, 1 << 12)
                status = _run_python(order["argv"])
            else:
                os.execvpe(order["argv"][0], order["argv"], os.environ)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _read(self, data: tuple[RunningProgram, bool], file: int) -> None:
        program, is_error = data
        if program.read(file, is_error) is False:
            self._close(program, file)

    def _close(self, program: RunningProgram, file: int) -> None:
        program.open.discard(file)
        self._selector.unregister(file)
        os.close(file)

    def _kill_late(self) -> None:
        now = time.monotonic()
        for program in self._running.values():
            if program.kill_at is not None and program.kill_at <= now:
                program.signal(signal.SIGKILL)

    def _reap(self) -> None:
        """Collect children that have ended. Report a program once all that it started has ended
        too.
        """
        leaders = {program.pid: program for program in self._running.values()}
        while True:
            try:
                child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if child is None:
                return
            program = leaders.get(child.si_pid)
            if program is not None:  # until it is reaped its number is nobody else's
                program.signal(signal.SIGKILL)
            _, status = os.waitpid(child.si_pid, 0)
            if program is not None:
                del self._running[program.number]
                self._end_strays()
                for file in list(program.open):
                    while program.read(file, self._selector.get_key(file).data[1]):
                        pass
                    self._close(program, file)
                code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                self._send(json.dumps(program.told(code)).encode() + b"\n")

    def _end_strays(self) -> None:
        """Kill processes that programs left behind: those adopted here that belong to no program
        that runs.
        """
        sessions = {program.pid for program in self._running.values()}
        markers = [program.marker for program in self._running.values()]
        for _ in range(64):
            strays = [
                pid
                for pid in _children()
                if pid not in sessions and not _belongs(pid, sessions, markers)
            ]
            if not strays:
                return
            for pid in strays:
                with contextlib.suppress(ProcessLookupError, PermissionError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def _end_all(self) -> None:
        """SIGTERM, a moment, SIGKILL; and whatever is left."""
        for program in self._running.values():
            program.signal(signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while self._running and time.monotonic() < until:
            self._gather()
            time.sleep(0.01)
        for program in self._running.values():
            program.signal(signal.SIGKILL)
        self._running.clear()
        self._end_strays()

    def _gather(self) -> None:
        for program in list(self._running.values()):
            with contextlib.suppress(ChildProcessError):
                if os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    continue
            program.signal(signal.SIGKILL)
            del self._running[program.number]


def _run_python(argv: list[str]) -> int:
    """Be `python SCRIPT ...` or `python -m MODULE ...` in this process; the exit status."""
    is_module = argv[1] == "-m"
    target = argv[2] if is_module else argv[1]
    sys.argv = argv[2:] if is_module else argv[1:]
    sys.path.insert(0, "" if is_module else str(Path(target).resolve().parent))
    random.seed()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _limit_memory(memory_mb: int | None, *, forked: bool) -> None:
    """Bytes of its own that the program may have, beside what a fork begins with."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb is None:
        return
    used_kb = 0
    if forked:
        with Path("/proc/self/status").open() as status:
            used_kb = next(
                (int(line.split()[1]) for line in status if line.startswith("VmData:")), 0
            )
    limit = (used_kb << 10) + (memory_mb << 20)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _children() -> list[int]:
    """Processes whose parent this one is."""
    own = os.getpid()
    try:
        return [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split()]
    except OSError:
        pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
        return [pid for pid in pids if _parent(pid) == own]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return -1


def _belongs(pid: int, sessions: set[int], markers: list[bytes]) -> bool:
    """Whether a process is of a program that runs: of its session, or with its environment."""
    try:
        if os.getsid(pid) in sessions:
            return True
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return any(marker in environment for marker in markers)


def main() -> None:
    """Import what programs share, and serve."""
    owner = socket.socket(fileno=int(sys.argv[-1]))
    owner.set_inheritable(False)
    own = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != own]
    library = ctypes.CDLL(None)
    library.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # one that was stopped could not end what it has started
    library.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder, modules = sys.argv[1], sys.argv[2:-1]
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        if not _import(owner, folder, modules):
            sys.exit(1)
        gc.collect()
        gc.freeze()
        _say(owner, {"ready": True})
        ProgramHost(owner, forks=bool(modules)).serve()


def _import(owner: socket.socket, folder: str, modules: list[str]) -> bool:
    """Import modules, from a folder too; False where one cannot be."""
    if folder:
        sys.path.insert(0, folder)
    for name in modules:
        _say(owner, {"importing": name})
        try:
            importlib.import_module(name)
        except BaseException as error:
            traceback.print_exc()
            _say(owner, {"failed": name, "error": f"{type(error).__name__}: {error}"})
            return False
    if folder and folder in sys.path:
        sys.path.remove(folder)
    return True


def _say(owner: socket.socket, line: dict[str, Any]) -> None:
    owner.sendall(json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    main()
