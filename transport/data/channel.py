"""Between what a channel promises and how its bytes travel: `Network`, `Connection`, `Listener`.

`Sender` and `Receiver` keep the promises (order, credit, acknowledgement, redelivery) on any
`Network`, as `SocketNetwork` is. Within one process no bytes travel (`local`).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import pyarrow as pa
import zmq

from transport.data.frames import BatchEncoder
from transport.data.messages import Data, Message


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
