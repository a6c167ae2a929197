"""The ledger's service as a child of the scheduler: forked before there are threads, started again
when it falls.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from dataflow.errors import Replaced, RunError
from dataflow.folder.ledger import Ledger
from dataflow.folder.ledger_service.service import STOP, LedgerService, RequestHandler
from dataflow.system.child import Child, fork
from dataflow.system.files import RunFolderError
from dataflow.system.interrupts import leave_to_leader
from dataflow.system.log import log_to
from dataflow.system.messages import Channel, Codec, Life, Message, MessageError, Secret, field
from dataflow.system.security import RunKeys

START_S = 30.0
"""Seconds for the service to listen."""
STOP_S = 5.0
_TURN_S = 0.05
_AGAIN_S = 0.25
"""Seconds before it is started again."""
_REPLACED = 3
"""Exit status of a service that finds another holder of the run."""

Holds: TypeAlias = Callable[[], None]
"""As `RunHold.check`."""


class Serve(Secret, kw_only=True):
    """Have the ledger open for all, at an address; replaces what was served before."""

    ledger: str
    address: str
    """tcp://HOST:* or with a port; ipc://PATH."""
    keys: Mapping[str, bytes] = field(default_factory=dict)
    first: Life | None = None
    """As `RequestHandler` has it."""


class Listening(Message):
    """It takes calls at this address."""

    address: str


class CannotStart(Message):
    """The service does not listen, for this reason."""

    why: str


_Said: TypeAlias = Serve | Listening | CannotStart
_CODEC: Codec[_Said] = Codec("dataflow.ledger-process", 1, Serve, Listening, CannotStart)


class LedgerProcess:
    """The service in the hands of the scheduler, with which it ends, however that ends.

    A process between the two, without threads, raises the counter of who holds the run, also while
    the scheduler waits for hosts or is stopped by Ctrl-Z, and starts the service again at the same
    address when it falls: the scheduler itself cannot fork any more by then.
    """

    def __init__(self, holds: Holds = lambda: None, log: Path | None = None) -> None:
        """Fork it; call this before the process has threads. log: where it writes what it would
        print.
        """
        self._channel, theirs = Channel.pair(_CODEC, START_S)
        self._process = fork(
            partial(_Supervisor(holds, log).run, theirs),
            keep=[theirs.fileno()],
            ends_with_parent=signal.SIGKILL,
        )
        theirs.close()
        self.address = ""
        """Where clients ask; empty before it serves."""

    def serve(
        self, ledger: Path, address: str, keys: RunKeys | None = None, first: Life | None = None
    ) -> str:
        """Serve a ledger, which need not exist before the first request; the address, once it
        listens. Errors: RunError when it does not listen in time; Replaced.
        """
        plain = {} if keys is None else keys.to_plain()
        try:
            self._channel.send(Serve(ledger=str(ledger), address=address, keys=plain, first=first))
            reply = self._channel.receive(START_S)
        except (EOFError, OSError) as error:
            self.check()
            raise RunError(
                f"the ledger's service did not start: {error}; see logs/ledger.log"
            ) from error
        if isinstance(reply, Listening):
            self.address = reply.address
            return reply.address
        assert isinstance(reply, CannotStart), "what it says"
        raise RunError(reply.why)

    def check(self) -> None:
        """Errors: Replaced once the service has found another holder of the run; RunError when it
        has ended.
        """
        status = self._process.poll()
        if status == _REPLACED:
            raise Replaced(
                f"this scheduler (process {os.getpid()}) was not heard for too long, so another one"
                " holds its run, and it ends without touching it; `dataflow doctor` tells how that"
                " goes on"
            )
        if status is not None:
            raise RunError(
                f"the ledger's service has ended with status {status}; see logs/ledger.log, then"
                " resume"
            )

    def close(self) -> None:
        """End it; what was committed stays."""
        self._channel.close()
        self._process.end(2 * STOP_S)

    def __enter__(self) -> "LedgerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Supervisor:
    """The process between scheduler and service.

    consumes: what is to be served; the end of the service
    produces: the service, started again when it falls; a counter that is raised
    waits for: either, for a moment
    unblocked by: the scheduler, which closes the channel; its end, with which the kernel ends this
        process

    Signals to all processes of a job, a terminal or a run are for the scheduler, which still needs
    the ledger then.
    """

    def __init__(self, holds: Holds, log: Path | None) -> None:
        self._holds, self._log = holds, log
        self._child: Child | None = None
        self._wanted: Serve | None = None

    def run(self, theirs: socket.socket) -> int:
        """The exit status."""
        leave_to_leader()
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        if self._log is not None:
            log_to(self._log)
        channel = Channel(theirs, _CODEC, START_S)
        try:
            while True:
                self._turn(channel)
        except Replaced as error:
            print(error, flush=True)
            return _REPLACED
        except EOFError:
            return 0
        finally:
            self._stop()

    def _turn(self, channel: Channel[_Said]) -> None:
        # the disk does not say; the service asks before it does anything
        with contextlib.suppress(RunFolderError):
            self._holds()
        if channel.readable(_TURN_S):
            for message in channel.arrived():
                assert isinstance(message, Serve), "what is said to it"
                self._stop()
                reply = self._start(message)
                if isinstance(reply, Listening):
                    self._wanted = replace(message, address=reply.address)
                channel.send(reply)
        if (
            self._child is not None
            and self._wanted is not None
            and (status := self._child.poll()) is not None
        ):
            if status == _REPLACED:
                raise Replaced("the service has found that somebody else holds the run")
            print(
                f"the ledger's service has ended with status {status}: starting it again",
                flush=True,
            )
            time.sleep(_AGAIN_S)
            self._start(self._wanted)

    def _start(self, request: Serve) -> Listening | CannotStart:
        channel, ends = Channel.pair(_CODEC, START_S)
        self._child = fork(
            partial(_serve, request, self._holds, ends), ends_with_parent=signal.SIGKILL
        )
        ends.close()
        try:
            reply = channel.receive(START_S)
        except (EOFError, OSError, MessageError) as error:
            self._child.kill()
            return CannotStart(f"the ledger's service did not start: {error}; see logs/ledger.log")
        finally:
            channel.close()
        assert not isinstance(reply, Serve), "what it says"
        return reply

    def _stop(self) -> None:
        if self._child is not None:
            self._child.signal(STOP)
            self._child.end(STOP_S)
        self._child = self._wanted = None


def _serve(request: Serve, holds: Holds, ends: socket.socket) -> int:
    """The service's process."""
    channel = Channel(ends, _CODEC, START_S)
    with contextlib.ExitStack() as open_:

        def handler() -> RequestHandler:
            ledger = open_.enter_context(Ledger.open(request.ledger))
            request_handler = RequestHandler(ledger, first=request.first, holds=holds)
            open_.callback(request_handler.close)
            return request_handler

        try:
            service = LedgerService(handler, request.address, RunKeys.from_plain(request.keys))
        except RunError as error:
            channel.send(CannotStart(str(error)))
            return 1
        open_.callback(service.close)
        signal.signal(STOP, lambda number, frame: service.stop())
        channel.send(Listening(service.address))
        channel.close()
        try:
            service.run()
        except Replaced as error:
            print(error, flush=True)
            os._exit(_REPLACED)
    return 0
