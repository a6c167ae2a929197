"""A network within one process: what `transport.data` says between processes, without bytes or
sockets.

A `Sender` and a `Receiver` with the same `LocalNetwork` and address are a pair; drive both from one
thread.
"""

import itertools
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, cast

import pyarrow as pa
import zmq

from transport.data import messages
from transport.data.messages import Data, Message
from transport.data.sockets import Arrival, ConnectionEvent, Junk, Packed
from transport.errors import AddressError


class LocalNetwork:
    """Addresses of one process; any string is one."""

    def __init__(self) -> None:
        self._listeners: dict[str, LocalListener] = {}
        self._tokens = itertools.count(1)

    def connect(self, address: str) -> "LocalConnection":
        """A connection to the receiver at `address`, now or when it appears."""
        return LocalConnection(self, address)

    def listen(
        self, address: str, *, max_message_bytes: int, queue_messages: int
    ) -> "LocalListener":
        """Listen at `address`; raises AddressError when somebody does."""
        if address in self._listeners:
            raise AddressError(f"'{address}' is taken; got a second receiver; close the first one")
        self._listeners[address] = LocalListener(self, address)
        return self._listeners[address]

    def at(self, address: str) -> "LocalListener | None":
        """Who listens there."""
        return self._listeners.get(address)

    def leave(self, address: str) -> None:
        """Nobody listens there any more."""
        self._listeners.pop(address, None)

    def token(self) -> int:
        """A name for a new connection."""
        return next(self._tokens)


class LocalConnection:
    """A sender's end of a connection."""

    sockets: "Sequence[zmq.Socket[bytes]]" = ()

    def __init__(self, network: LocalNetwork, address: str) -> None:
        self.address = address
        self._network = network
        self._listener: LocalListener | None = None
        self._token = 0
        self._replies: deque[Message] = deque()

    def pack(
        self, batch: pa.RecordBatch, encoder: messages.BatchEncoder, size_bytes: int
    ) -> Packed:
        """The batch itself: it is immutable."""
        return Packed(content=batch, size_bytes=size_bytes, checksum=0)

    def put(self, message: Message, payload: Any = None) -> bool:
        """Hand over; False when the receiver closed."""
        if self._listener is None or self._network.at(self.address) is not self._listener:
            return False
        self._listener.arrivals.append(
            Arrival(connection=self._token, message=message, payload=payload)
        )
        return True

    def get(self) -> Message | ConnectionEvent | Junk | None:
        """What the receiver answered, or how the connection changed."""
        if self._replies:
            return self._replies.popleft()
        listener = self._network.at(self.address)
        if listener is self._listener:
            return None
        if self._listener is not None:
            self._listener = None
            return ConnectionEvent.LOST
        self._listener, self._token = listener, self._network.token()
        if listener is None:
            return None
        listener.connections[self._token] = self._replies
        return ConnectionEvent.UP

    def wait(self, timeout_s: float) -> None:
        """Nothing happens in one process while one waits."""

    def close(self) -> None:
        """Let go of the connection."""
        if self._listener is not None:
            self._listener.connections.pop(self._token, None)
        self._listener = None


class LocalListener:
    """A receiver's end of its connections."""

    sockets: "Sequence[zmq.Socket[bytes]]" = ()

    def __init__(self, network: LocalNetwork, address: str) -> None:
        self.address = address
        self._network = network
        self.arrivals: deque[Arrival] = deque()
        self.connections: dict[Hashable, deque[Message]] = {}

    def get(self, timeout_s: float) -> Arrival | Junk | None:
        """The next arrival; nothing arrives in one process while one waits."""
        return self.arrivals.popleft() if self.arrivals else None

    def waiting(self) -> bool:
        """Whether something arrived that `get` did not return yet."""
        return bool(self.arrivals)

    def put(self, connection: Hashable, message: Message) -> None:
        """Answer a sender that is still there."""
        replies = self.connections.get(connection)
        if replies is not None:
            replies.append(message)

    def assemble(self, begun: Any, payload: Any, message: Data) -> Any:
        """The batch itself, which comes with each of its parts."""
        return payload

    def open(self, body: Any, message: Data, schema: pa.Schema) -> pa.RecordBatch:
        """The batch, checked as if it had come from elsewhere."""
        batch = cast(pa.RecordBatch, body)
        messages.check_schema(batch.schema, schema, edge=message.edge)
        messages.check_batch(batch, message)
        return batch

    def close(self) -> None:
        """Stop listening."""
        if self._network.at(self.address) is self:
            self._network.leave(self.address)
