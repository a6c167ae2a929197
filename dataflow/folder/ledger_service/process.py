"""The ledger's service as a child of the scheduler: forked before there are threads, started again when it falls."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dataflow.errors import Replaced, RunError
from dataflow.folder.ledger import Ledger
from dataflow.folder.ledger_service.desk import Desk
from dataflow.folder.ledger_service.service import LedgerService, stop_on_signals
from dataflow.system.channel import Channel
from dataflow.system.child import Forked, end, fork
from dataflow.system.log import log_to
from dataflow.system.messages import Codec
from dataflow.system.security import RunKeys

START_S = 30.0
"""For the service to open the ledger and to listen."""
STOP_S = 5.0
_AGAIN_S = 0.25
"""Before it is started again."""
_REPLACED = 3
"""Exit status of one that finds that somebody else holds the run."""


@dataclass(frozen=True)
class Listening:
    """It takes calls at this address."""

    address: str


@dataclass(frozen=True)
class CannotStart:
    """It does not, for this reason."""

    why: str


_CODEC: Codec[Listening | CannotStart] = Codec("dataflow.ledger-process", 1, Listening, CannotStart)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the service is to be."""

    ledger: Path
    address: str
    """tcp://HOST:* or with a port; ipc://PATH."""
    keys: RunKeys | None
    floor: int = 0
    """As `Desk` has it."""
    holds: Callable[[], None] = lambda: None
    """As `Desk` has it."""
    log: Path | None = None


class LedgerProcess:
    """The service in the hands of the scheduler, with which it ends, however that ends.

    A process between the two, without threads, starts the service again at the same address when it falls: the
    scheduler itself cannot fork any more by then.
    """

    def __init__(self, wanted: Wanted) -> None:
        """Fork it; call this before the process has threads. Errors: RunError when it does not listen in time."""
        channel, theirs = Channel.pair(_CODEC, START_S)
        self._process = fork(
            partial(_supervise, wanted, theirs), keep=[theirs.fileno()], ends_with_parent=signal.SIGKILL
        )
        theirs.close()
        try:
            said = channel.receive(START_S)
        except (EOFError, TimeoutError, OSError) as error:
            self.close()
            raise RunError(
                f"the ledger's service did not start within {START_S:.0f} s: {error}; see logs/ledger.log"
            ) from error
        finally:
            channel.close()
        if isinstance(said, CannotStart):
            self.close()
            raise RunError(said.why)
        self.address = said.address
        """Where clients ask."""

    def check(self) -> None:
        """Errors: Replaced once the service has found that somebody else holds the run; RunError when it has ended."""
        status = self._process.poll()
        if status == _REPLACED:
            raise Replaced(
                f"this scheduler (process {os.getpid()}) was not heard for too long, so another one holds its run, and "
                f"it ends without touching it; `dataflow doctor` tells how that goes on"
            )
        if status is not None:
            raise RunError(f"the ledger's service has ended with status {status}; see logs/ledger.log, then resume")

    def close(self) -> None:
        """End it; what was committed stays."""
        self._process.signal(signal.SIGTERM)
        end(self._process, STOP_S)


def _supervise(wanted: Wanted, theirs: socket.socket) -> int:
    """Keep a service at work until this process is asked to end; the exit status."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    if wanted.log is not None:
        log_to(wanted.log)
    told: Channel[Any] | None = Channel(theirs, _CODEC, START_S)
    address = wanted.address
    while not asked:
        heard, ends = Channel.pair(_CODEC, START_S)
        child = fork(partial(_serve, wanted, address, ends), ends_with_parent=signal.SIGKILL)
        ends.close()
        said = _first_word(heard, child)
        heard.close()
        if told is not None:
            with contextlib.suppress(OSError):
                told.send(said)
            told.close()
            told = None
            if isinstance(said, CannotStart):
                return 1
        if isinstance(said, Listening):
            address = said.address
        status = _outlasts(child, asked)
        if asked:
            break
        if status == _REPLACED:
            return _REPLACED
        print(f"the ledger's service has ended with status {status}: starting it again", flush=True)
        time.sleep(_AGAIN_S)
    return 0


def _first_word(heard: "Channel[Any]", child: Forked) -> Listening | CannotStart:
    try:
        said: Listening | CannotStart = heard.receive(START_S)
        return said
    except (EOFError, TimeoutError, OSError) as error:
        child.kill()
        return CannotStart(f"the ledger's service did not start: {error}; see logs/ledger.log")


def _outlasts(child: Forked, asked: "list[int]") -> int:
    """Wait for the end of the service, or have it end when this process is asked to; its exit status."""
    while (status := child.poll()) is None:
        if asked:
            child.signal(signal.SIGTERM)
            return end(child, STOP_S)
        time.sleep(0.05)
    return status


def _serve(wanted: Wanted, address: str, ends: socket.socket) -> int:
    """The service's process."""
    told = Channel(ends, _CODEC, START_S)
    try:
        ledger = Ledger.open(wanted.ledger)
        service = LedgerService(Desk(ledger, floor=wanted.floor, holds=wanted.holds), address, wanted.keys)
    except RunError as error:
        told.send(CannotStart(str(error)))
        return 1
    stop_on_signals(service)
    told.send(Listening(service.address))
    told.close()
    try:
        service.run()
    except Replaced as error:
        print(error, flush=True)
        return _REPLACED
    service.close()
    ledger.close()
    return 0
