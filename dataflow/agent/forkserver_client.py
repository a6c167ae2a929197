"""The scheduler's handle on its forkserver, which holds the graph in memory and forks a worker in
milliseconds.

The scheduler forks it before it has threads or sockets, so the user's functions reach the workers
by inheritance: nothing is pickled, and a graph built in a notebook runs like one built in a file.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from dataflow.agent.forkserver import WITHOUT_SCHEDULER, Forkserver, Main, open_takeover
from dataflow.agent.messages import (
    CODEC,
    SEND_S,
    Alive,
    AllHanded,
    End,
    Handed,
    Notice,
    Pause,
    SendSignal,
    Spawn,
    Stay,
    TakenAway,
)
from dataflow.errors import Replaced, RunError
from dataflow.system.child import KILL_S, Child, fork, refuse_used_cuda
from dataflow.system.log import log_to
from dataflow.system.messages import Channel, MessageError

_TAKEOVER_S = 10.0
"""For a forkserver that is taken over to answer."""

Event = dict[str, Any]
"""{"event": "started" | "stopped" | "continued" | "exited" | "gone", "name", "pid", "status"}."""


class ForkserverClient:
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
        takeover: str = "",
        standby: Callable[[], int] | None = None,
        log: str = "",
    ) -> None:
        """Fork it.

        main: run by each worker; environment: set before anything heavy is imported; preload:
        imports it; clean_up: run once all workers have ended, also where the scheduler was killed;
        takeover: path at which the next scheduler takes the workers over; standby: what one runs
        that the forkserver is to fork itself; log: where it writes what it would print, as a
        terminal that nobody reads would hold it up.
        """
        refuse_used_cuda(
            "a worker", "call run(...) before anything touches the GPU, or from a fresh process"
        )
        connection, theirs = Channel.pair(CODEC, SEND_S)

        def run() -> int:
            connection.close()
            os.environ.update(environment)
            if log:
                log_to(Path(log))
            control = Channel(theirs, CODEC, SEND_S)
            return Forkserver(
                control,
                open_takeover(takeover) if takeover else None,
                main,
                preload,
                clean_up,
                standby,
            ).run()

        process = fork(run)
        theirs.close()
        self._hold(connection, process)

    def _hold(self, connection: Channel[Any], process: Child) -> None:
        self.pid = process.pid
        self._connection, self._process, self._is_replaced = connection, process, False

    def spawn(
        self, name: str, settings: Mapping[str, Any], heavy: bool, keeps: bool = False
    ) -> None:
        """Ask for a worker; heavy ones are forked after `preload`, which light ones asked for
        earlier do not wait for.

        keeps: the others wait for its end when the scheduler has ended and nobody took its
        place.
        """
        self._send(Spawn(name, settings, heavy, keeps))

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a worker."""
        self._send(SendSignal(name, int(number)))

    def pause(self, is_paused: bool) -> None:
        """Let all workers stand still, or go on."""
        self._send(Pause(is_paused))

    def stay(self, wait_s: float, end_s: float, silent_s: float) -> None:
        """From now on the workers outlive a scheduler that dies: so long they wait for another,
        then to end. Where one can be forked, it comes also when this one was silent for
        `silent_s`.
        """
        self._send(Stay(wait_s, end_s, silent_s))

    def live(self) -> None:
        """Give a sign of life."""
        with contextlib.suppress(OSError):  # it has much to do, or has ended, which is an event
            self._connection.flush()
            if not self._connection.has_output:
                self._connection.post(Alive())

    def events(self) -> list[Event]:
        """What has happened since the last call. Errors: Replaced, as soon as another one has the
        workers.
        """
        events: list[Event] = []
        if not self._is_replaced:
            try:
                messages = self._connection.arrived()
            except (EOFError, OSError, MessageError):
                return [{"event": "gone", "name": "forkserver", "pid": self.pid, "status": None}]
            events = [asdict(message) for message in messages if isinstance(message, Notice)]
            self._is_replaced = any(isinstance(message, TakenAway) for message in messages)
        if not self._is_replaced:
            return events
        raise Replaced(
            f"this scheduler (process {os.getpid()}) was not heard for too long, so its standby has"
            " taken the run over, and it ends without touching it; logs/scheduler.log in the run's"
            " folder tells how that goes on, and `dataflow stop` ends it"
        )

    @property
    def pollable(self) -> int:
        """Readable when something has happened."""
        return self.fileno()

    def fileno(self) -> int:
        """For a poller."""
        return self._connection.fileno()

    def leave(self) -> None:
        """Leave it to another scheduler."""
        self._connection.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """End it and all of its workers; returns within the time-out, by SIGKILL if need be.
        Errors: Replaced.
        """
        with contextlib.suppress(OSError):
            self._connection.post(End())
        # in the midst of `preload`, or of the program, it reads nothing
        if self._process.poll() is None:
            self._process.signal(WITHOUT_SCHEDULER)
        deadline = time.monotonic() + timeout_s
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._connection.close()
        if time.monotonic() >= deadline:
            with contextlib.suppress(ProcessLookupError):  # of a successor it is no child
                os.kill(self.pid, signal.SIGKILL)
        self._process.end(KILL_S)

    def _has_ended(self) -> bool:
        return any(event["event"] == "gone" for event in self.events())

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            self.events()  # perhaps it is another's
            raise RunError(
                f"the forkserver (pid {self.pid}) is gone: {error}; see logs/forkserver.log, and"
                " start the run again"
            ) from error


class TakenOverForkserver(ForkserverClient):
    """The forkserver of a scheduler that has ended."""

    def __init__(self, takeover: str) -> None:
        """Take the workers over. Errors: RunError when there is no such forkserver, or it does not
        answer.
        """
        self.handed: list[Event] = []
        """Every worker, as it was when its scheduler had ended: "name", "pid", "settings", "alive",
        "status"."""
        try:
            connection = Channel(_connected(takeover), CODEC, SEND_S)
        except OSError as error:
            raise _nobody(takeover, error) from error
        try:
            while isinstance(message := connection.receive(_TAKEOVER_S), Handed):
                self.handed.append(asdict(message))
            if isinstance(message, AllHanded):
                self._hold(connection, Child(message.pid))
                self.alone_s, self.number, self.lives = (
                    message.alone_s,
                    message.number,
                    message.lives,
                )
                """As `AllHanded` says."""
                return
            raise ConnectionResetError("it ended in the midst of its answer")
        except (OSError, EOFError) as error:
            connection.close()
            raise _nobody(takeover, error) from error


def _connected(takeover: str) -> socket.socket:
    """A connection to the socket at a path. Raises OSError."""
    with contextlib.ExitStack() as on_error:
        end = on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        end.settimeout(_TAKEOVER_S)
        end.connect(takeover)
        on_error.pop_all()
    return end


def _nobody(takeover: str, error: Exception) -> RunError:
    return RunError(
        f"nobody keeps workers at '{Path(takeover).parent.name}' ({error}): they have ended, or"
        " their scheduler lives; look with ps"
    )
