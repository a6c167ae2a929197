"""Channels between processes: ZeroMQ, a DEALER for every sender's connection and a ROUTER at every
receiver.

Credit bounds what is in flight, so senders have no high-water mark that could drop anything.
Liveness comes from ZeroMQ's own heartbeats, which its I/O thread answers while a worker computes
for minutes.
"""

import contextlib
import ctypes
import sys
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, cast

import pyarrow as pa
import zmq
from zmq.utils.monitor import parse_monitor_message

from transport.data import messages
from transport.data.messages import (
    MAX_HEADER_BYTES,
    BatchEncoder,
    Data,
    Message,
    decode_message,
    encode_message,
)
from transport.errors import AddressError, FrameError
from transport.security import Guard, Keys, check_address, present, watch

# Between what a channel promises and how its bytes travel: `Network`, `Connection`, `Listener`.
#
# `Sender` and `Receiver` keep the promises (order, credit, acknowledgement, redelivery) on any
# `Network`, as `SocketNetwork` is. Within one process no bytes travel (`local`).


class ConnectionEvent(Enum):
    """What happens to a connection."""

    UP = "up"
    """The other side can be spoken to, perhaps for the first time, perhaps after a restart."""
    LOST = "lost"
    """It cannot; whatever was under way may be lost."""
    REJECTED = "rejected"
    """It does not accept our key."""
    FAILED = "failed"
    """Connecting was tried and did not work; it is tried again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A message at a receiver."""

    connection: Hashable
    """The connection that it came over."""
    message: Message
    """The message."""
    payload: Any = None
    """What came with a Data message, unopened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Junk:
    """Something at a receiver, or on a connection, that is no message."""

    connection: Hashable
    """The connection that it came over."""
    reason: str
    """What is wrong with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """What travels for one batch, kept by the sender until it is acknowledged."""

    content: Any
    """The encoded body, or what the network makes of the batch."""
    size_bytes: int
    """Length of the encoded body."""
    checksum: int
    """xxh3_64 of the body; 0 where the network makes no bytes."""


class Connection(Protocol):
    """A sender's connection to one receiver."""

    address: str
    """Where the receiver is."""
    sockets: Sequence[zmq.Socket[bytes]]
    """What a poller may watch; the first carries the messages."""

    def pack(self, batch: pa.RecordBatch, encoder: BatchEncoder, size_bytes: int) -> Packed:
        """What travels for a batch; the same may go over several connections, and more than
        once.
        """

    def put(self, message: Message, payload: Any = None) -> bool:
        """Send, of the payload the part that a Data message names; False when the connection takes
        nothing now.
        """

    def get(self) -> Message | ConnectionEvent | Junk | None:
        """The next thing that happened; None when nothing did. Never blocks."""

    def wait(self, timeout_s: float) -> None:
        """Return when `get` has something, or after the timeout."""

    def close(self) -> None:
        """Let go of the connection."""


class Listener(Protocol):
    """A receiver's end of all its connections."""

    address: str
    """Where senders find it."""
    sockets: Sequence[zmq.Socket[bytes]]
    """What a poller may watch; the first carries the messages."""

    def get(self, timeout_s: float) -> Arrival | Junk | None:
        """The next thing that arrived, within the timeout."""

    def waiting(self) -> bool:
        """Whether something arrived that `get` did not return yet."""

    def put(self, connection: Hashable, message: Message) -> None:
        """Send an answer; for a lost connection it is dropped, as the sender will say Hello
        again.
        """

    def assemble(self, begun: Any, payload: Any, message: Data) -> Any:
        """What has come of a batch: `begun`, which is None at its first part, and the part in this
        payload.

        Raises FrameError for a part of another length, or of a batch that does not fit into
        memory.
        """

    def open(self, body: Any, message: Data, schema: pa.Schema) -> pa.RecordBatch:
        """The batch that `assemble` has whole, checked; raises FrameError."""

    def close(self) -> None:
        """Stop listening; the address is free when this returns."""


class Network(Protocol):
    """A way to reach other workers."""

    def connect(self, address: str) -> Connection:
        """Connect to a receiver, which may appear later."""

    def listen(self, address: str, *, max_message_bytes: int, queue_messages: int) -> Listener:
        """Listen at an address."""


# Keeps freed memory in the process, so that a stream of large messages does not fault its pages in
# again and again.


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to keep up to 256 MiB of freed memory; whether it could be told.

    By default every block above 128 KiB is mapped afresh, and the kernel zeroes its pages at each
    use.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES // 8)) and bool(
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    )


_RECONNECT_MS, _RECONNECT_MAX_MS = 20, 500
_REPLY_LINGER_MS = 1_000
_UNBIND_TIMEOUT_S = 2.0
_SPARE_MESSAGES = 1_000
_COPY_BELOW_BYTES = 4 << 20
"""Lending memory to ZeroMQ wakes a thread that needs the GIL: below this, one more copy costs
less."""
_STATE, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
_EVENTS = {
    int(zmq.Event.HANDSHAKE_SUCCEEDED): ConnectionEvent.UP,
    int(zmq.Event.DISCONNECTED): ConnectionEvent.LOST,
    int(zmq.Event.HANDSHAKE_FAILED_AUTH): ConnectionEvent.REJECTED,
    int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL): ConnectionEvent.FAILED,
    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): ConnectionEvent.FAILED,
}
_FAILURES = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class SocketNetwork:
    """Channels over ipc and tcp; with the keys of a run, encrypted and closed to all others."""

    def __init__(
        self, *, keys: Keys | None = None, context: "zmq.Context[Any] | None" = None
    ) -> None:
        self._keys = keys
        self._context = context

    def connect(self, address: str) -> "SocketConnection":
        """Connect to a receiver, which may appear later. Raises AddressError."""
        check_address(address, self._keys)
        return SocketConnection(self._context or zmq.Context.instance(), address, self._keys)

    def listen(
        self, address: str, *, max_message_bytes: int, queue_messages: int
    ) -> "SocketListener":
        """Listen at an address; port `*` takes a free one. Raises AddressError."""
        check_address(address, self._keys)
        context = self._context or zmq.Context.instance()
        return SocketListener(context, address, self._keys, max_message_bytes, queue_messages)


class SocketConnection:
    """A sender's connection to one receiver."""

    def __init__(self, context: "zmq.Context[Any]", address: str, keys: Keys | None) -> None:
        self.address = address
        self._socket = context.socket(zmq.DEALER)
        watch(self._socket, address)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
        self._socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._socket.set(zmq.LINGER, 0)
        if keys is not None:
            present(self._socket, keys)
        self._monitor = self._socket.get_monitor_socket(sum(_EVENTS))
        self._socket.connect(address)
        self.sockets: Sequence[zmq.Socket[bytes]] = (self._socket, self._monitor)

    def pack(
        self, batch: pa.RecordBatch, encoder: messages.BatchEncoder, size_bytes: int
    ) -> Packed:
        """The encoded batch, in memory that ZeroMQ owns or, for a large one, borrows."""
        body = encoder.encode(batch, size_bytes)
        content = zmq.Frame(body, copy=size_bytes < _COPY_BELOW_BYTES)
        return Packed(content=content, size_bytes=size_bytes, checksum=messages.checksum(body))

    def put(self, message: Message, payload: Any = None) -> bool:
        """Queue a message; False when ZeroMQ takes nothing."""
        header = encode_message(message)
        parts = [header] if payload is None else [header, _part(payload, message)]
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def get(self) -> Message | ConnectionEvent | Junk | None:
        """A change of the connection, or a message of the receiver."""
        if _readable(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            return _EVENTS[int(event["event"])]
        if not _readable(self._socket):
            return None
        parts = self._socket.recv_multipart(zmq.NOBLOCK)
        try:
            if len(parts) != 1:
                raise FrameError(
                    f"a reply has one frame; got {len(parts)}; it is not of this protocol"
                )
            return decode_message(parts[0])
        except FrameError as error:
            return Junk(connection=0, reason=str(error))

    def wait(self, timeout_s: float) -> None:
        """Return when there is something to get, or after the timeout."""
        poller = zmq.Poller()
        for socket in self.sockets:
            poller.register(socket, zmq.POLLIN)
        poller.poll(max(0, round(timeout_s * 1000)))

    def close(self) -> None:
        """Let go of the connection; what is still queued is dropped."""
        _close(self.sockets)


class SocketListener:
    """A receiver's end of all its connections."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        address: str,
        keys: Keys | None,
        max_message_bytes: int,
        queue_messages: int,
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self._deaf: deque[Junk] = deque(maxlen=_SPARE_MESSAGES)
        self._guard = None if keys is None else Guard(keys)
        self._socket = (context if self._guard is None else self._guard.context).socket(zmq.ROUTER)
        watch(self._socket, address)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.RCVHWM, queue_messages + _SPARE_MESSAGES)
        self._socket.set(zmq.SNDHWM, queue_messages + _SPARE_MESSAGES)
        self._socket.set(zmq.MAXMSGSIZE, 2 * max_message_bytes + MAX_HEADER_BYTES)
        self._socket.set(zmq.LINGER, _REPLY_LINGER_MS)
        if self._guard is not None:
            self._guard.protect(self._socket)
        self._monitor = self._socket.get_monitor_socket(_FAILURES | zmq.Event.CLOSED)
        self.sockets: Sequence[zmq.Socket[bytes]] = (self._socket, self._monitor)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._release()
            raise AddressError(
                f"cannot listen at {address}; {error.strerror}; choose an address that nobody"
                " else has"
            ) from error
        self.address = self._socket.last_endpoint.decode()

    def get(self, timeout_s: float) -> Arrival | Junk | None:
        """The next arrival within the timeout; a peer whose handshake failed counts as junk."""
        if _readable(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            if int(event["event"]) & _FAILURES:
                return Junk(
                    connection="a peer without a handshake",
                    reason=str(zmq.Event(event["event"]).name),
                )
        if self._deaf:
            return self._deaf.popleft()
        if not _readable(self._socket) and (
            timeout_s <= 0 or not self._socket.poll(max(1, round(timeout_s * 1000)))
        ):
            return None
        parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        connection = parts[0].bytes
        sizes = [len(part) for part in parts[1:]]
        try:
            if not 1 <= len(sizes) <= 2 or max(sizes) > max(
                self._max_message_bytes, MAX_HEADER_BYTES
            ):
                raise FrameError(
                    f"a message has the wrong form; got frames of {sizes[:4]} bytes; send a header"
                    f" and one batch of at most {self._max_message_bytes} bytes"
                )
            message = decode_message(parts[1].buffer)
            if (len(sizes) == 2) != isinstance(message, Data):
                raise FrameError(
                    f"a message has the wrong form; got frames of {sizes} bytes; send it whole"
                )
        except FrameError as error:
            return Junk(connection=connection, reason=str(error))
        return Arrival(
            connection=connection, message=message, payload=parts[2] if len(sizes) == 2 else None
        )

    def waiting(self) -> bool:
        """Whether something arrived that `get` did not return yet."""
        return _readable(self._socket)

    def put(self, connection: Hashable, message: Message) -> None:
        """Answer; a connection that is gone is ignored.

        More answers than a sender with all its credit can have open only wait for one that asks and
        never reads.
        """
        assert isinstance(connection, bytes)
        try:
            self._socket.send_multipart([connection, encode_message(message)], zmq.NOBLOCK)
        except zmq.Again:
            self._deaf.append(
                Junk(connection=connection, reason="it does not read what it is answered")
            )
        except zmq.ZMQError:
            return

    def assemble(self, begun: Any, payload: Any, message: Data) -> Any:
        """The memory of a message that has all; else of the batch, which fills part by part."""
        part = payload.buffer
        if len(part) != message.part_bytes:
            raise FrameError(
                f"a batch is cut; got {len(part)} bytes of {message.part_bytes}; send it again"
            )
        return part if len(part) == message.bytes else messages.put_together(begun, part, message)

    def open(self, body: Any, message: Data, schema: pa.Schema) -> pa.RecordBatch:
        """Decode and check, in the memory where it lies."""
        return messages.decode_batch(body, message, schema)

    def close(self) -> None:
        """Stop listening; returns when the address is free."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.unbind(self.address)
            self._await_unbound()
        self._release()

    def _await_unbound(self) -> None:
        deadline = time.monotonic() + _UNBIND_TIMEOUT_S
        while (remaining_s := deadline - time.monotonic()) > 0:
            if self._monitor.poll(max(1, round(remaining_s * 1000))):
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                if int(event["event"]) == zmq.Event.CLOSED:
                    return

    def _release(self) -> None:
        _close(self.sockets)
        if self._guard is not None:
            self._guard.close()


def _part(content: zmq.Frame, message: Message) -> zmq.Frame:
    """What of an encoded batch travels with a message: a part is lent from it or copied, as a whole
    one is.
    """
    if not isinstance(message, Data) or message.part_bytes == message.bytes:
        return content
    part = content.buffer[message.offset : message.offset + message.part_bytes]
    return zmq.Frame(part, copy=len(part) < _COPY_BELOW_BYTES)


def _readable(socket: "zmq.Socket[bytes]") -> bool:
    """Whether there is something to receive; asking first is far cheaper than an exception."""
    return bool(cast(int, socket.get(_STATE)) & _READABLE)


def _close(sockets: "Sequence[zmq.Socket[bytes]]") -> None:
    if not sockets[0].closed:
        sockets[0].disable_monitor()
    for socket in sockets:
        socket.close()
