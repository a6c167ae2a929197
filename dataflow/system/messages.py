"""Messages between the processes of a run: their codec, numbers that bring them over a network that
is cut, and framed messages over a socket pair that only two processes hold.
"""

import array
import contextlib
import math
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from dataflow.system.clocks import Countdown
from transport.codec import (
    MESSAGE_BYTES,
    Codec,
    Message,
    MessageError,
    Natural,
    Plain,
    Secret,
    field,
)
from transport.life import Life, LifeMessage, Refused, replaced
from transport.numbered import Frames, Numbered

__all__ = [
    "MESSAGE_BYTES",
    "Channel",
    "Codec",
    "Frames",
    "Life",
    "LifeMessage",
    "Message",
    "MessageError",
    "Natural",
    "Numbered",
    "Plain",
    "Refused",
    "Secret",
    "field",
    "replaced",
]


# Framed messages over a socket pair: length, then what the codec made of the message. A message may
# have a body, bytes that no codec looks into; it stands before its message, with a length marked
# so.


LENGTH = struct.Struct("<Q")
"""What stands before each message."""
BODY = 1 << 63
"""Set in the length of a body."""
_READ_BYTES = 1 << 18
_RIGHTS_BYTES = socket.CMSG_LEN(16 * array.array("i").itemsize)
"""For the open files that come with one read."""

M = TypeVar("M")


class Channel(Generic[M]):
    """One end of a socket pair; read by one thread, written by one at a time.

    The end of either process closes it, which the other one notices.

    consumes: messages that the peer sends
    produces: messages to it, in order; open files with them
    waits for: the peer in `send` and `receive`, up to a deadline; `post` and `arrived` return at
        once
    unblocked by: what the peer reads or sends, or its end
    """

    def __init__(self, end: socket.socket, codec: Codec[M], send_s: float = 0.0) -> None:
        """Take over a connected stream socket; `send_s` bounds the wait for a peer that does not
        read.
        """
        end.settimeout(None)  # one of its own would make calls wait that return at once
        self._end, self._codec, self._send_s = end, codec, send_s
        self._out: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._inbox = bytearray()
        self._frames: deque[bytes] = deque()
        self._is_over = False
        self.files: deque[int] = deque()
        """Open files that came with messages, for the caller to take and to close."""
        self.bodies: deque[bytes] = deque()
        """Those of the messages that have one, in their order, for the caller to take."""

    @classmethod
    def pair(cls, codec: Codec[M], send_s: float = 0.0) -> "tuple[Channel[M], socket.socket]":
        """A channel, and the other end of its socket pair, for a child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours, codec, send_s), theirs

    def fileno(self) -> int:
        """For a poller."""
        return self._end.fileno()

    def send(self, message: M, body: bytes | None = None) -> None:
        """Hand over a message. Raises OSError (TimeoutError, BrokenPipeError) when the peer does
        not take it.
        """
        self.post(message, body=body)
        flush_all([self], self._send_s)

    def post(self, message: M, files: Sequence[int] = (), body: bytes | None = None) -> None:
        """Have a message sent, with open files and a body, as soon as the peer takes it: what it
        takes now, and later by `flush`.

        Raises OSError when the peer is gone, MessageError where the body is too large.
        """
        self.post_frame(self.framed(message, body), files)

    def post_frame(self, frame: memoryview, files: Sequence[int] = ()) -> None:
        """`post` of what `framed` made of a message, here or at another channel of the codec."""
        self._out.append((frame, [os.dup(file) for file in files]))
        self.flush()

    def framed(self, message: M, body: bytes | None = None) -> memoryview:
        """As it travels. MessageError where it is too large."""
        data = self._codec.encode(message)
        frames = [LENGTH.pack(len(data)), data]
        if body is not None:
            self._check_size(len(body))
            frames = [LENGTH.pack(len(body) | BODY), body, *frames]
        return memoryview(b"".join(frames))

    @property
    def has_output(self) -> bool:
        """Whether something waits for the peer to read."""
        return bool(self._out)

    @property
    def has_input(self) -> bool:
        """Whether something that the peer sent waits to be read; its end alone is nothing."""
        try:
            return bool(self._end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def flush(self) -> None:
        """Send what the peer takes now. Raises OSError when it is gone."""
        with contextlib.suppress(BlockingIOError):
            while self._out:
                data, files = self._out[0]
                rights = (
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
                    if files
                    else []
                )
                sent = self._end.sendmsg([data], rights, socket.MSG_DONTWAIT)
                _close_all(files)
                if sent < len(data):
                    self._out[0] = data[sent:], ()
                else:
                    self._out.popleft()

    def receive(self, wait_s: float) -> M:
        """The next message. Raises EOFError when the peer has closed its end, TimeoutError after
        `wait_s` seconds (what has come so far is kept), MessageError for what is no message.
        """
        wait = Countdown(wait_s)
        while not self._frames:
            if self._is_over:
                raise EOFError("the other side has closed the channel")
            if self.readable(wait.slice_s):
                self._take_in()
            elif wait.is_over:
                raise TimeoutError("the other side says nothing")
        return self._codec.decode(self._frames.popleft())

    def arrived(self) -> list[M]:
        """The messages that are there now. Raises EOFError when there is none, and the peer has
        closed its end; MessageError for what is no message.
        """
        while not self._is_over and self._take_in():
            pass
        if self._is_over and not self._frames:
            raise EOFError("the other side has closed the channel")
        messages: list[M] = []
        while self._frames:
            try:
                messages.append(self._codec.decode(self._frames[0]))
            except MessageError:
                if messages:  # they come first
                    return messages
                raise
            self._frames.popleft()
        return messages

    def readable(self, wait_s: float | None) -> bool:
        """Whether a message, or a part of one, or the peer's end comes within `wait_s` seconds;
        None: waits for it.
        """
        return bool(self._frames) or self._is_over or bool(ready([self], select.POLLIN, wait_s))

    @property
    def is_abandoned(self) -> bool:
        """Whether the peer has closed its end, whatever of it is still to be read."""
        return bool(ready([self], 0, 0.0))

    def close(self) -> None:
        """Close this end."""
        self._end.close()
        for files in (self.files, *(files for _, files in self._out)):
            _close_all(files)
        self._out.clear()
        self.files.clear()

    def _check_size(self, length: int) -> None:
        if length > self._codec.max_bytes:
            raise MessageError(
                f"a message on a channel is too large; found {length} bytes, the bound is"
                f" {self._codec.max_bytes}; send less at once"
            )

    def _take_in(self) -> bool:
        """Read once; whether there may be more."""
        try:
            data, rights, _, _ = self._end.recvmsg(_READ_BYTES, _RIGHTS_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data, rights = b"", []
        for _, _, files in rights:
            self.files.extend(array.array("i", files))
        self._is_over = not data
        self._inbox += data
        at = 0
        while len(self._inbox) - at >= LENGTH.size:
            (marked,) = LENGTH.unpack_from(self._inbox, at)
            length = marked & ~BODY
            self._check_size(length)
            stop = at + LENGTH.size + length
            if len(self._inbox) < stop:
                break
            (self.bodies if marked & BODY else self._frames).append(
                bytes(self._inbox[at + LENGTH.size : stop])
            )
            at = stop
        del self._inbox[:at]
        return len(data) == _READ_BYTES or bool(rights)  # a read ends behind open files


def ready(channels: Iterable[Channel[Any]], event: int, wait_s: float | None) -> list[Channel[Any]]:
    """Those where `event` (POLLIN, POLLOUT), or the peer's end, has come within `wait_s` seconds;
    None: waits for one. Their files may have any number, which `select.select` does not allow.
    """
    poll, by_file = select.poll(), {channel.fileno(): channel for channel in channels}
    for file in by_file:
        poll.register(file, event)
    wait_ms = None if wait_s is None else math.ceil(1000 * max(0.0, wait_s))
    return [by_file[file] for file, _ in poll.poll(wait_ms)]


def flush_all(channels: Iterable[Channel[Any]], wait_s: float) -> None:
    """Send what was posted; the peers take it at the same time. Raises OSError when one is gone or
    does not read for `wait_s` seconds.
    """
    wait = Countdown(wait_s)
    while waiting := [channel for channel in channels if channel.has_output]:
        writable = ready(waiting, select.POLLOUT, wait.slice_s)
        for channel in writable:
            channel.flush()
        if not writable and wait.is_over:
            raise TimeoutError("the other side does not read")


def _close_all(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)
