"""Frames between the engine and vLLM's process: length, then a msgpack map, over a socket pair that
has no name.

The pair is made by the parent and its other end is inherited, so nobody else can connect, no file
is left behind, and either side reads the end of the stream when the other one is gone. vLLM and
what it imports print to stdout, so that one is a log. The file imports nothing of this project:
vLLM's environment reads it too.

    parent asks                                          vLLM's process answers
    open    model, dtype, sizes, weights (once, first)   ready    vllm, platform, cache_tokens
    step    starts: [{prompt, most, tickets, seeds,      stepped  version, tickets, tokens,
            sampling, ends}], aborts: [tickets]                   logprobs, ended: [tickets],
                                                                  reasons: [stop|length|error]
    update  version, weights                             updated  version
    (end of the stream)                                  (ends)
                                                         failed   error (then the stream's end)

Requests are answered in their order, and a step is made only when it is asked for. Arrays travel as
their bytes: tickets int64, tokens and prompts int32, logprobs float32, little-endian. A `stepped`
has one entry per new token.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

try:
    from msgpack import packb, unpackb
except ImportError:
    from msgspec.msgpack import decode as unpackb  # type: ignore[import-not-found,unused-ignore]
    from msgspec.msgpack import encode as packb

LENGTH = struct.Struct("<I")
"""What stands before each message."""
MOST_BYTES = 1 << 30
"""Of one message: a longer one is not ours."""


class ServerStream:
    """One end of the stream; used by one thread."""

    def __init__(self, end: socket.socket) -> None:
        """Take a connected stream socket."""
        self._end = end
        self._read = bytearray()

    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        """Send one message. Raises TimeoutError, or ConnectionError where the other side is
        gone.
        """
        body = packb(message)
        if len(body) > MOST_BYTES:
            raise ValueError(
                f"a message has at most {MOST_BYTES} bytes; found {len(body)}; send less at once"
            )
        self._end.settimeout(timeout_s)
        self._end.sendall(LENGTH.pack(len(body)) + body)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next message. Raises TimeoutError (what has come so far is kept), ConnectionError at
        the end.
        """
        deadline = time.monotonic() + timeout_s
        self._fill(LENGTH.size, deadline)
        (length,) = LENGTH.unpack_from(self._read)
        if length > MOST_BYTES:
            raise ConnectionError(
                f"a message has at most {MOST_BYTES} bytes; found {length}; this is another stream"
            )
        self._fill(LENGTH.size + length, deadline)
        message = unpackb(bytes(self._read[LENGTH.size : LENGTH.size + length]))
        del self._read[: LENGTH.size + length]
        return message  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the stream."""
        self._end.close()

    def _fill(self, count: int, deadline: float) -> None:
        while len(self._read) < count:
            self._end.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._end.recv(1 << 20)
            if not part:
                raise ConnectionError("the other side has ended the stream")
            self._read += part
