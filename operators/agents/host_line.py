"""The worker's end of the process that starts programs: orders out, ends in; that process is
replaced when it dies.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dataflow.errors import DeadlineError, Unusable
from dataflow.system.child import started

HOST = Path(__file__).with_name("program_host.py")
MARKER = "DATAFLOW_PROGRAMS"
"""In the environment of all that is started there."""
_CLOSE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class EndedProgram:
    """How a program ended."""

    number: int
    status: int
    """Exit status; minus a signal's number."""
    last: str
    """Last line of its output."""
    errors: str
    """The end of what it said on stderr."""
    is_too_much: bool
    """Whether it said more than it may."""


class HostLine:
    """The connection to the process that starts programs.

    consumes: orders by `start` and `stop`, from one thread
    produces: ends of programs, from `ended`
    waits for: nothing; every call returns at once, but for `restart` and `close`
    unblocked by: `fileno`, readable when `ended` has something to do
    """

    is_ready: bool
    """Whether it has imported what programs share; what it is told before waits."""
    importing: str | None
    """The module that it imports, or died of."""

    def __init__(
        self,
        python: str,
        modules: Sequence[str],
        folder: str = "",
        *,
        start_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start it. python: its interpreter. modules: imported there, for programs that are forks
        of it. folder: from which, too. start_s: for that.
        """
        self._command = [python, *([] if modules else ["-I"]), str(HOST), folder, *modules]
        self._start_s, self._clock = start_s, clock
        self._marker = secrets.token_hex(16)
        self._in, self._out = bytearray(), bytearray()
        self._begin()

    def fileno(self) -> int:
        """Of the socket."""
        return self._socket.fileno()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def start(self, number: int, order: Mapping[str, Any]) -> None:
        """Start a program. order: as `program_host` has it."""
        self._send({"start": number, **order})

    def stop(self, number: int) -> None:
        """End a program; nothing where it has ended."""
        self._send({"end": number})

    def ended(self) -> list[EndedProgram] | None:
        """Programs that have ended, each with all that it had started; None: the process is gone,
        `restart` it.

        Raises Unusable where a module cannot be imported, DeadlineError where that takes too
        long.
        """
        self._process.let_go_on()
        self._flush()
        is_over = False
        with contextlib.suppress(BlockingIOError):
            try:
                while piece := self._socket.recv(1 << 18):
                    self._in += piece
                is_over = True
            except ConnectionError:
                is_over = True
        *lines, unfinished = bytes(self._in).split(b"\n")
        self._in = bytearray(unfinished)
        messages = [
            message for message in map(json.loads, lines) if not self._is_beginning(message)
        ]
        if is_over and not messages:
            return None
        if not self.is_ready and self._clock() > self._begun + self._start_s:
            raise DeadlineError(
                f"the process that starts programs is not ready after {self._start_s:g} s; found it"
                f" importing {self.importing or 'nothing yet'}; give imports= modules that take"
                " less, or raise Limits.start_s"
            )
        return [EndedProgram(number=message.pop("ended"), **message) for message in messages]

    def restart(self) -> None:
        """Another process in place of one that is gone, when nothing is left that it had
        started.
        """
        self._end(0.0)
        self._begin()

    def close(self) -> None:
        """End it, with all programs."""
        self._end(_CLOSE_S)

    def _is_beginning(self, message: Mapping[str, Any]) -> bool:
        """Note a message about the process's own start; True if it was one."""
        if "failed" in message:
            raise Unusable(
                f"what programs share cannot be imported; found imports={message['failed']!r} to"
                " end"
                f" with {message['error']} in {self._command[0]}; install it there, or correct"
                " imports="
            )
        self.importing = None if "ready" in message else message.get("importing", self.importing)
        self.is_ready |= "ready" in message
        return "ended" not in message

    def _begin(self) -> None:
        self._in, self._out = bytearray(), bytearray()
        self.is_ready, self._begun = False, self._clock()
        self.importing = None
        theirs: socket.socket
        self._socket: socket.socket
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._process = started(
                self._command,
                environment={**os.environ, MARKER: self._marker},
                end=theirs,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _end(self, within_s: float) -> None:
        self._socket.close()
        if self._process.end(within_s):  # it has not ended them itself
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if process.environ().get(MARKER) == self._marker:
                        process.kill()

    def _send(self, order: Mapping[str, Any]) -> None:
        self._out += json.dumps(order).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        # that the process is gone shows when reading
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._out:
                del self._out[: self._socket.send(self._out)]
