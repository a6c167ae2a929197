"""Words between rank 0 and one other rank: msgpack behind a length, over a socket pair that only the two hold."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Mapping
from typing import Any

import msgpack

from dataflow.system.clocks import Countdown

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 16


class Channel:
    """One end of a socket pair. The end of either process closes it, which the other one notices at once."""

    def __init__(self, end: socket.socket, send_s: float) -> None:
        """Take over a connected stream socket; `send_s` bounds the wait for a peer that does not read."""
        self._end = end
        self._send_s = send_s

    def fileno(self) -> int:
        """For a poller, and to hand this end to a process."""
        return self._end.fileno()

    def send(self, word: Mapping[str, Any]) -> None:
        """Hand over one word. Raises OSError (TimeoutError, BrokenPipeError) when the peer does not take it."""
        data = msgpack.packb(dict(word))
        left, wait = memoryview(_LENGTH.pack(len(data)) + data), Countdown(self._send_s)
        while left:
            if select.select([], [self._end], [], wait.slice_s)[1]:
                left = left[self._end.send(left, socket.MSG_DONTWAIT) :]
            elif wait.is_over:
                raise TimeoutError

    def receive(self, wait_s: float) -> dict[str, Any]:
        """The next word. Raises EOFError when the peer has closed its end, TimeoutError after `wait_s` seconds."""
        wait = Countdown(wait_s)
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, wait))
        return msgpack.unpackb(self._exactly(length, wait))  # type: ignore[no-any-return]

    def readable(self, wait_s: float) -> bool:
        """Whether a word, or the peer's end, comes within `wait_s` seconds."""
        return bool(select.select([self._end], [], [], wait_s)[0])

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def _exactly(self, count: int, wait: Countdown) -> bytes:
        parts: list[bytes] = []
        while count:
            if not self.readable(wait.slice_s):
                if wait.is_over:
                    raise TimeoutError
                continue
            try:
                part = self._end.recv(min(count, _CHUNK))
            except ConnectionResetError:
                part = b""
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
