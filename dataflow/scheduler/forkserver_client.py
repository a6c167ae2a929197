"""The scheduler's handle on its forkserver, which holds the graph in memory and forks a worker in milliseconds.

The scheduler forks it before it has threads or sockets, so the user's functions reach the workers by inheritance:
nothing is pickled, and a graph built in a notebook runs like one built in a file.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack

from dataflow.errors import Replaced, RunError
from dataflow.scheduler.forkserver import MESSAGE_BYTES, Forkserver, Main, open_door, run_forever
from dataflow.system.forking import fork, has_used_cuda
from dataflow.system.log import log_to

Event = dict[str, Any]
"""{"event": "started" | "stopped" | "continued" | "exited" | "gone", "name", "pid", "status"}."""


class Nursery:
    """A forkserver in the hands of its scheduler.

    consumes: spawn requests
    produces: events of the workers
    waits for: nothing; `events` returns what has happened
    unblocked by: the forkserver's answers on its socket
    """

    def __init__(
        self,
        main: Main,
        environment: Mapping[str, str],
        preload: Callable[[], None],
        clean_up: Callable[[], None] = lambda: None,
        door: str = "",
        successor: Callable[[], int] | None = None,
        log: str = "",
    ) -> None:
        """Fork it.

        main: run by each worker; environment: set before anything heavy is imported; preload: imports it; clean_up:
        run once all workers have ended, also where the scheduler was killed; door: path at which a successor of the
        scheduler takes the workers over; successor: what one runs that the forkserver is to fork itself; log: where it
        writes what it would print, as a terminal that nobody reads would hold it up.
        """
        _refuse_used_cuda()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = fork()
        if pid == 0:
            ours.close()
            os.environ.update(environment)
            if log:
                log_to(Path(log))
            run_forever(
                lambda: Forkserver(theirs, open_door(door) if door else None, main, preload, clean_up, successor).run()
            )
        theirs.close()
        self._hold(ours, pid)

    def _hold(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._socket, self._is_replaced = connection, False
        self._socket.setblocking(False)

    def spawn(self, name: str, settings: Mapping[str, Any], heavy: bool, keeps: bool = False) -> None:
        """Ask for a worker; heavy ones are forked after `preload`, which light ones asked for earlier do not wait for.

        keeps: the others wait for its end when the scheduler has ended and nobody took its place."""
        self._send({"spawn": name, "settings": dict(settings), "heavy": heavy, "keeps": keeps})

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a worker."""
        self._send({"kill": name, "signal": int(number)})

    def pause(self, is_paused: bool) -> None:
        """Let all workers stand still, or go on."""
        self._send({"pause": is_paused})

    def stay(self, wait_s: float, end_s: float, silent_s: float) -> None:
        """From now on the workers outlive a scheduler that dies: so long they wait for another, then to end. Where one
        can be forked, it comes also when this one was silent for `silent_s`."""
        self._send({"stay": wait_s, "end": end_s, "silent": silent_s})

    def live(self) -> None:
        """Give a sign of life."""
        with contextlib.suppress(OSError):  # it has much to do, or has ended, which is an event
            self._socket.send(msgpack.packb({"here": True}))

    def events(self) -> list[Event]:
        """What has happened since the last call. Errors: Replaced, as soon as another one has the workers."""
        found: list[Event] = []
        while not self._is_replaced:
            try:
                data = self._socket.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return found
            except OSError:
                data = b""
            if not data:
                found.append({"event": "gone", "name": "nursery", "pid": self.pid, "status": None})
                return found
            event = msgpack.unpackb(data)
            self._is_replaced = event["event"] == "replaced"
            found.append(event)
        raise Replaced(
            f"this scheduler (process {os.getpid()}) was not heard for too long, so its standby has taken the run "
            f"over, and it ends without touching it; logs/scheduler.log in the run's folder tells how that goes on, "
            f"and `dataflow stop` ends it"
        )

    def fileno(self) -> int:
        """For a poller."""
        return self._socket.fileno()

    def leave(self) -> None:
        """Leave it to another scheduler."""
        self._socket.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """End it and all of its workers; returns within the time-out, by SIGKILL if need be. Errors: Replaced."""
        with contextlib.suppress(OSError):
            self._socket.send(msgpack.packb({"end": True}))
        deadline = time.monotonic() + timeout_s
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._socket.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if time.monotonic() >= deadline:
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def _has_ended(self) -> bool:
        return any(event["event"] == "gone" for event in self.events())

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._socket.send(msgpack.packb(message))
        except OSError as error:
            self.events()  # perhaps it is another's
            raise RunError(
                f"the forkserver (pid {self.pid}) is gone: {error}; see logs/nursery.log, and start the run again"
            ) from error


class TakenOver(Nursery):
    """The forkserver of a scheduler that has ended."""

    def __init__(self, door: str, timeout_s: float = 10.0) -> None:
        """Take the workers over. Errors: RunError when there is no such forkserver, or it does not answer."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(timeout_s)
        self.handed: list[Event] = []
        """Every worker, as it was when its scheduler had ended: "name", "pid", "settings", "alive", "status"."""
        try:
            connection.connect(door)
            while (event := msgpack.unpackb(connection.recv(MESSAGE_BYTES) or b"\xc0")) is not None:
                if event["event"] == "all_handed":
                    self._hold(connection, event["pid"])
                    self.alone_s: float = event["alone_s"]
                    """Seconds that the workers had no scheduler."""
                    self.number: int = event["number"]
                    """How many schedulers there were before."""
                    self.lives: bool = event["lives"]
                    """Whether the last of them lives, though it leads the run no more."""
                    return
                self.handed.append(event)
            raise ConnectionResetError("it ended in the midst of its answer")
        except OSError as error:
            connection.close()
            raise RunError(
                f"nobody keeps workers at '{Path(door).parent.name}' ({error}): they have ended, or their scheduler "
                f"lives; look with ps"
            ) from error


def _refuse_used_cuda() -> None:
    if has_used_cuda():
        raise RunError(
            "this process has already used CUDA, and a forked worker cannot use it again; "
            "call run(...) before anything touches the GPU, or from a fresh process"
        )
