"""A sandbox that is kept over several commands, seen from outside: started, asked, watched and
ended.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from operators.sandbox.bwrap import (
    SandboxError,
    held_below,
    last_words,
    private_bytes,
    refuse,
    shared_out_bytes,
    started,
)
from operators.sandbox.inside.first import SESSION
from operators.sandbox.inside.wire import FRAME, decode, encode

START_S = 20.0
_GRACE_S, _LOOK_S = 4.0, 0.2
_LARGEST_REPLY = 1 << 26
_ERROR_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class KeptLimits:
    """What a sandbox may use over all its commands."""

    memory_bytes: int = 1 << 29
    """Of all its processes together, and address space of each, Python's own included."""
    file_bytes: int = 64 << 20
    """All that it may have in files."""
    files: int = 1000
    output_bytes: int = 64 << 20
    """What one command may print before it is ended."""
    processes: int = 32


@dataclass(frozen=True)
class CommandResult:
    """How a command went."""

    output: str
    """What it printed, of both streams, cut where it is long."""
    total_bytes: int
    note: str
    """Why it did not end well; empty where it did."""


class CommandRefused(Exception):
    """A sound sandbox cannot do what the command asks; the text says why."""


class SandboxLost(CommandRefused):
    """A sandbox has passed its limits and is unusable."""


class KeptSandbox:
    """Processes in a sandbox of their own that wait for commands, until they or their owner end.

    consumes: commands, one at a time
    produces: a result for each
    waits for: the sandbox's reply, until the limit of the command and 4 s are over
    unblocked by: the reply, the sandbox's end, or the clock
    """

    def __init__(self, limits: KeptLimits, folders: Sequence[str] = ()) -> None:
        """Start it; `ready` becomes true later. Raises SandboxError where no sandbox is
        possible.
        """
        self._limits = limits
        self._errors = os.memfd_create("errors")
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        try:
            self._process = started(
                limits.file_bytes,
                programs=True,
                folders=folders,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
            )
        except SandboxError:
            self._close_files()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Of bubblewrap."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether bubblewrap is gone, and all in it."""
        return self._process.poll() is not None

    async def ready(self) -> None:
        """Tell it its limits, and wait until it takes commands. Raises SandboxError."""
        limits = self._limits
        cage = {
            "cpu_s": 1 << 20,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.file_bytes,
            "threads": limits.processes,
        }
        settings = {"files": limits.files, "output_bytes": limits.output_bytes, "cage": cage}
        await self._ask([SESSION, settings], START_S)

    async def python(self, code: str, *, timeout_s: float, most_bytes: int) -> CommandResult:
        """Run code; variables and imports are kept. Raises SandboxError; CommandRefused."""
        return await self._run("python", code, timeout_s, most_bytes)

    async def shell(self, command: str, *, timeout_s: float, most_bytes: int) -> CommandResult:
        """Run a command; folder and environment are kept. Raises SandboxError; CommandRefused."""
        return await self._run("shell", command, timeout_s, most_bytes)

    async def write(self, path: str, data: bytes) -> None:
        """Put a file below /tmp. Raises SandboxError; CommandRefused."""
        await self._ask(["write", path, data], START_S)

    async def read(self, path: str, *, most_bytes: int = 1 << 23) -> bytes:
        """The bytes of a file below /tmp. Raises SandboxError; CommandRefused where it is not
        there, or longer.
        """
        reply = await self._ask(["read", path, most_bytes], START_S)
        return bytes(reply[1])

    def kill(self) -> None:
        """End it, and all that is in it."""
        self._process.kill()
        self._process.wait()
        self._close_files()

    def _close_files(self) -> None:
        self._socket.close()
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1

    async def _run(
        self, command: str, text: str, timeout_s: float, most_bytes: int
    ) -> CommandResult:
        _, output, total, note = await self._ask(
            [command, text, float(timeout_s), most_bytes], timeout_s + _GRACE_S
        )
        return CommandResult(bytes(output).decode("utf-8", "replace"), total, note)

    async def _ask(self, request: list[Any], within_s: float) -> list[Any]:
        watch = asyncio.create_task(self._watched())
        ask = asyncio.create_task(self._exchanged(request))
        try:
            await asyncio.wait([watch, ask], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                raise SandboxLost(await watch)
            if not ask.done():
                raise SandboxError(f"a sandbox gave no answer for {within_s:g} s; {self._told()}")
            reply = await ask
        finally:
            for task in (watch, ask):
                task.cancel()
            await asyncio.wait([watch, ask])
        if reply[0] in ("failed", "lost"):
            raise (SandboxLost if reply[0] == "lost" else CommandRefused)(reply[1])
        return reply

    async def _exchanged(self, request: list[Any]) -> list[Any]:
        loop = asyncio.get_running_loop()
        data = encode(request, refuse)
        try:
            await loop.sock_sendall(self._socket, FRAME.pack(len(data)) + data)
            (size,) = FRAME.unpack(await self._exactly(FRAME.size))
            if size > _LARGEST_REPLY:
                raise ValueError(f"a reply of {size} bytes")
            reply = decode(await self._exactly(size), lambda number: None)
            if not isinstance(reply, list) or not reply:
                raise ValueError(f"the reply {reply!r:.40}")
            return reply
        except (
            OSError,
            EOFError,
            ValueError,
            TypeError,
            LookupError,
            struct.error,
            RecursionError,
        ) as error:
            raise SandboxError(
                f"a sandbox has ended ({error or type(error).__name__}); {self._told()}"
            ) from error

    async def _exactly(self, size: int) -> bytes:
        loop, parts = asyncio.get_running_loop(), bytearray()
        while len(parts) < size:
            part = await loop.sock_recv(self._socket, min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError("it closed its wire")
            parts += part
        return bytes(parts)

    async def _watched(self) -> str:
        """Returns once its processes hold more memory than they may: why."""
        while True:
            await asyncio.sleep(_LOOK_S)
            limit = self._limits.memory_bytes
            if all(
                held_below(self.pid, count) > limit for count in (private_bytes, shared_out_bytes)
            ):
                return f"took more than {self._limits.memory_bytes >> 20} MB of memory"

    def _told(self) -> str:
        if self._errors < 0:
            return "it was ended"
        return last_words(os.pread(self._errors, _ERROR_BYTES, 0))
