"""The worker's end of the process that starts programs: orders out, ends in; that process is replaced when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dataflow.system.child import end, started

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
    """Orders to the process that starts programs, and what it says.

    consumes: orders by `start` and `stop`, from one thread
    produces: ends of programs, from `ended`
    waits for: nothing; every call returns at once, but for `restart` and `close`
    unblocked by: `fileno`, readable when `ended` has something to do
    """

    def __init__(self, python: str, modules: Sequence[str]) -> None:
        """Start it. python: its interpreter. modules: imported there, for programs that are forks of it."""
        self._command = [python, *([] if modules else ["-I"]), str(HOST), *modules]
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
        """Programs that have ended, each with all that it had started; None: the process is gone, `restart` it."""
        self._flush()
        is_over = False
        with contextlib.suppress(BlockingIOError):
            try:
                while piece := self._socket.recv(1 << 18):
                    self._in += piece
                is_over = True
            except ConnectionError:
                is_over = True
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest)
        found = [json.loads(line) for line in lines]
        if is_over and not found:
            return None
        return [EndedProgram(number=each.pop("ended"), **each) for each in found]

    def let_go_on(self) -> None:
        """Let the process go on where somebody has stopped it."""
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG) is not None:
                self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Another process in place of one that is gone, when nothing is left that it had started."""
        self._end(0.0)
        self._begin()

    def close(self) -> None:
        """End it, with all programs."""
        self._end(_CLOSE_S)

    def _begin(self) -> None:
        self._in, self._out = bytearray(), bytearray()
        theirs: socket.socket
        self._socket: socket.socket
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._process = started(
                self._command, environment={**os.environ, MARKER: self._marker}, end=theirs,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def _end(self, within_s: float) -> None:
        self._socket.close()
        if end(self._process, within_s):  # it has not ended them itself
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if process.environ().get(MARKER) == self._marker:
                        process.kill()

    def _send(self, order: Mapping[str, Any]) -> None:
        self._out += json.dumps(order).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):  # that the process is gone shows when reading
            while self._out:
                del self._out[: self._socket.send(self._out)]
