"""A forkserver: holds the graph in memory, imports torch once, and forks a worker in milliseconds.

The scheduler forks the nursery before it has threads or sockets, so the user's functions reach the workers by
inheritance: nothing is pickled, and a graph built in a notebook runs like one built in a file.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgpack

from dataflow.errors import RunError

_MESSAGE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1

Main = Callable[[Mapping[str, Any]], int]
"""What a worker runs: takes its settings, returns the exit status."""


class Nursery:
    """The scheduler's handle on the forkserver.

    consumes: spawn requests
    produces: ("started" | "exited", name, pid, status) events from `events`
    waits for: nothing; `events` returns what has happened
    unblocked by: the forkserver's answers on its socket
    """

    def __init__(
        self,
        main: Main,
        environment: Mapping[str, str],
        preload: Callable[[], None],
        clean_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Fork it.

        main: run by each worker; environment: set before anything heavy is imported; preload: imports it;
        clean_up: run once all workers have ended, also where the scheduler was killed.
        """
        _refuse_used_cuda()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            run_forever(lambda: _serve(theirs, main, environment, preload, clean_up))
        theirs.close()
        self._socket = ours
        self._socket.setblocking(False)

    def spawn(self, name: str, settings: Mapping[str, Any], heavy: bool) -> None:
        """Ask for a worker; heavy ones are forked after torch has been imported."""
        self._send({"spawn": name, "settings": dict(settings), "heavy": heavy})

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a worker."""
        self._send({"kill": name, "signal": int(number)})

    def events(self) -> list[dict[str, Any]]:
        """What has happened since the last call: {"event": "started" | "exited" | "gone", "name", "pid", "status"}."""
        found: list[dict[str, Any]] = []
        while True:
            try:
                data = self._socket.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return found
            except OSError:
                data = b""
            if not data:
                found.append({"event": "gone", "name": "nursery", "pid": self.pid, "status": None})
                return found
            found.append(msgpack.unpackb(data))

    def fileno(self) -> int:
        """For a poller."""
        return self._socket.fileno()

    def close(self, timeout_s: float = 5.0) -> None:
        """End it and all of its workers; returns within the time-out, by SIGKILL if need be."""
        with contextlib.suppress(OSError):
            self._socket.close()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.01)
                    continue
            return
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._socket.send(msgpack.packb(message))
        except OSError as error:
            raise RunError(
                f"the forkserver (pid {self.pid}) is gone: {error}; see logs/nursery.log, and start the run again"
            ) from error


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


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


def _serve(
    control: socket.socket,
    main: Main,
    environment: Mapping[str, str],
    preload: Callable[[], None],
    clean_up: Callable[[], None],
) -> int:
    names: dict[int, str] = {}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: _end(names, clean_up))
    die_with_parent(signal.SIGTERM)
    os.environ.update(environment)
    waiting: list[dict[str, Any]] = []
    loaded = False
    while True:
        ready, _, _ = select.select([control], [], [], 0.0 if waiting else 0.05)
        if ready:
            data = control.recv(_MESSAGE_BYTES)
            if not data:
                break
            message = msgpack.unpackb(data)
            if "kill" in message:
                _signal([pid for pid, name in names.items() if name == message["kill"]], message["signal"])
            elif message["heavy"] and not loaded:
                waiting.append(message)
            else:
                _fork(control, message, main, names)
        elif waiting:
            if not loaded:
                preload()
                loaded = True
            _fork(control, waiting.pop(0), main, names)
        _reap(control, names)
    _end(names, clean_up)


def _end(names: Mapping[int, str], clean_up: Callable[[], None]) -> NoReturn:
    """Kill the workers and what they started, then clean up; also in the midst of `preload`."""
    _signal(list(names), signal.SIGKILL)
    for pid in list(names):
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            _kill_group(pid)
            os.waitpid(pid, 0)
    clean_up()
    os._exit(0)


def _fork(control: socket.socket, message: Mapping[str, Any], main: Main, names: dict[int, str]) -> None:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        control.close()
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        run_forever(lambda: main(message["settings"]))
    names[pid] = message["spawn"]
    _tell(control, {"event": "started", "name": message["spawn"], "pid": pid, "status": None})


def _reap(control: socket.socket, names: dict[int, str]) -> None:
    """Tell of the workers that have ended; what they had started ends with them, before another takes their place."""
    while names:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return
        _kill_group(ended.si_pid)
        pid, status = os.waitpid(ended.si_pid, 0)
        name = names.pop(pid, "unknown")
        _tell(control, {"event": "exited", "name": name, "pid": pid, "status": os.waitstatus_to_exitcode(status)})


def _tell(control: socket.socket, event: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        control.send(msgpack.packb(event))


def _kill_group(leader: int) -> None:
    """Kill what a worker that has ended, and is not reaped, leaves: until then its number is nobody else's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _refuse_used_cuda() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RunError(
            "this process has already used CUDA, and a forked worker cannot use it again; "
            "call run(...) before anything touches the GPU, or from a fresh process"
        )
