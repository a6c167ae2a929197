"""Channels within one process: the same messages, credits and acknowledgements, without bytes or sockets.

A `Sender` and a `Receiver` with the same `LocalNetwork` and address are a pair; drive both from one thread.
"""

import itertools
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, cast

import pyarrow as pa
import zmq

from transport.data import frames
from transport.data.channel import Arrival, Junk, LineEvent, Packed
from transport.data.messages import Data, Message
from transport.errors import AddressError


class LocalNetwork:
    """Addresses of one process; any string is one."""

    def __init__(self) -> None:
        self._doors: dict[str, LocalDoor] = {}
        self._tokens = itertools.count(1)

    def line(self, address: str) -> "LocalLine":
        """A connection to the receiver at `address`, now or when it appears."""
        return LocalLine(self, address)

    def door(self, address: str, *, max_message_bytes: int, queue_messages: int) -> "LocalDoor":
        """Listen at `address`; raises AddressError when somebody does."""
        if address in self._doors:
            raise AddressError(f"'{address}' is taken; got a second receiver; close the first one")
        self._doors[address] = LocalDoor(self, address)
        return self._doors[address]

    def at(self, address: str) -> "LocalDoor | None":
        """Who listens there."""
        return self._doors.get(address)

    def leave(self, address: str) -> None:
        """Nobody listens there any more."""
        self._doors.pop(address, None)

    def token(self) -> int:
        """A name for a new connection."""
        return next(self._tokens)


class LocalLine:
    """A sender's end of a connection."""

    sockets: "Sequence[zmq.Socket[bytes]]" = ()

    def __init__(self, network: LocalNetwork, address: str) -> None:
        self.address = address
        self._network = network
        self._door: LocalDoor | None = None
        self._token = 0
        self._replies: deque[Message] = deque()

    def pack(self, batch: pa.RecordBatch, encoder: frames.Encoder, size_bytes: int) -> Packed:
        """The batch itself: it is immutable."""
        return Packed(content=batch, size_bytes=size_bytes, checksum=0)

    def put(self, message: Message, payload: Any = None) -> bool:
        """Hand over; False when the receiver closed."""
        if self._door is None or self._network.at(self.address) is not self._door:
            return False
        self._door.arrivals.append(Arrival(line=self._token, message=message, payload=payload))
        return True

    def get(self) -> Message | LineEvent | Junk | None:
        """What the receiver answered, or how the connection changed."""
        if self._replies:
            return self._replies.popleft()
        door = self._network.at(self.address)
        if door is self._door:
            return None
        if self._door is not None:
            self._door = None
            return LineEvent.LOST
        self._door, self._token = door, self._network.token()
        if door is None:
            return None
        door.lines[self._token] = self._replies
        return LineEvent.UP

    def wait(self, timeout_s: float) -> None:
        """Nothing happens in one process while one waits."""

    def close(self) -> None:
        """Let go of the connection."""
        if self._door is not None:
            self._door.lines.pop(self._token, None)
        self._door = None


class LocalDoor:
    """A receiver's end of its connections."""

    sockets: "Sequence[zmq.Socket[bytes]]" = ()

    def __init__(self, network: LocalNetwork, address: str) -> None:
        self.address = address
        self._network = network
        self.arrivals: deque[Arrival] = deque()
        self.lines: dict[Hashable, deque[Message]] = {}

    def get(self, timeout_s: float) -> Arrival | Junk | None:
        """The next arrival; nothing arrives in one process while one waits."""
        return self.arrivals.popleft() if self.arrivals else None

    def waiting(self) -> bool:
        """Whether something arrived that `get` did not return yet."""
        return bool(self.arrivals)

    def put(self, line: Hashable, message: Message) -> None:
        """Answer a sender that is still there."""
        replies = self.lines.get(line)
        if replies is not None:
            replies.append(message)

    def assemble(self, begun: Any, payload: Any, message: Data) -> Any:
        """The batch itself, which comes with each of its parts."""
        return payload

    def open(self, body: Any, message: Data, schema: pa.Schema) -> pa.RecordBatch:
        """The batch, checked as if it had come from elsewhere."""
        batch = cast(pa.RecordBatch, body)
        frames.check_schema(batch.schema, schema, edge=message.edge)
        frames.check_batch(batch, message)
        return batch

    def close(self) -> None:
        """Stop listening."""
        if self._network.at(self.address) is self:
            self._network.leave(self.address)
