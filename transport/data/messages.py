"""What senders and receivers of one edge say to each other: five messages.

sender -> receiver    Hello     who I am, what I send, where I stand; repeated after every
                                reconnection, when a window shrank, at the end of the stream, and
                                when it begins again
                      Data      one record batch, or a part of one that is too large for a message
receiver -> sender    Welcome   your window, and what I have of you: the rest is sent again
                      Ack       these batches are done with, and of others these rows; your window
                                from now on
                      Refusal   no, and why

A message is one header frame, and for `Data` one body frame (`frames`). The header is what the
codec makes of the message, followed by its own xxh3_64, so that no byte of it can change unnoticed.
"""

from typing import Annotated, Any

import msgspec
import xxhash

from transport import codec
from transport.codec import Codec, Natural
from transport.errors import FrameError

SEAL_BYTES = 8
MAX_HEADER_BYTES = 1 << 20
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""Of one batch, in rows or bytes; counts of many such batches stay within 64 bits."""


class Hello(codec.Message, kw_only=True):
    """The state of a sender towards one receiver."""

    edge: str
    """Name of the edge."""
    sender: str
    """Name of the sender, the same after a restart."""
    epoch: Natural
    """Incarnation of the sender; larger after each restart."""
    schema: bytes
    """Arrow schema of the batches, as an IPC message."""
    base: Natural
    """Lowest sequence number that may come."""
    next: Natural
    """Sequence number that the next new batch will have."""
    gone: tuple[Natural, ...]
    """Sequence numbers from base on that will not come (again): acknowledged, or taken back."""
    window_rows: Natural
    """The window that the sender goes by: rows."""
    window_bytes: Natural
    """The window that the sender goes by: bytes."""
    window_number: Natural
    """Number of that window; 0: it goes by none yet."""
    ended: bool
    """Whether no batch will follow."""
    number: Natural = 0
    """Larger in each later Hello of this sender and epoch: so one read late, from a connection that
    broke, is known."""


class Data(codec.Message, kw_only=True):
    """The header of one record batch, or of a part of it: its parts follow each other, and nothing
    comes between.
    """

    edge: str
    """Name of the edge."""
    sender: str
    """Name of the sender."""
    epoch: Natural
    """Incarnation of the sender."""
    sequence: Natural
    """0, 1, 2, ... per sender, epoch and receiver."""
    rows: Size
    """Rows of the batch."""
    bytes: Size
    """Length of the encoded batch."""
    checksum: Natural
    """xxh3_64 of the encoded batch; 0 where no bytes are made."""
    offset: Size = 0
    """Bytes of the batch that earlier parts have."""
    left: Size = 0
    """Bytes of the batch that later parts have."""

    @property
    def part_bytes(self) -> int:
        """Length of this part."""
        return self.bytes - self.offset - self.left


class Welcome(codec.Message, kw_only=True):
    """What a receiver grants to one sender, and what it has of it."""

    edge: str
    """Name of the edge."""
    epoch: Natural
    """Incarnation of the receiver."""
    window_rows: Natural
    """The window: rows that may be unacknowledged."""
    window_bytes: Natural
    """The window: encoded bytes that may be unacknowledged."""
    window_number: Natural
    """Number of the window: larger, each time that the receiver says another."""
    capacity_rows: Natural
    """Rows that the receiver holds at most, of all senders."""
    capacity_bytes: Natural
    """Bytes that the receiver holds at most, of all senders."""
    max_message_bytes: Natural
    """Bytes of the largest message that it takes: a larger batch comes in parts."""
    expected: Natural
    """Sequence number that it has not seen yet; everything from here on is to be sent again."""
    held: tuple[Natural, ...]
    """Sequence numbers below `expected` that are not acknowledged yet."""
    ended: bool
    """Whether it knows where the stream ends."""
    answers: Natural = 0
    """Number of the newest Hello that it has of this sender, so that an answer read late is
    known."""
    early: tuple[Natural, ...] = ()
    """Of the batches that it holds, rows that are done with: as in Ack."""


class Ack(codec.Message, kw_only=True):
    """Batches that the consumer is done with."""

    edge: str
    """Name of the edge."""
    epoch: Natural
    """Incarnation of the receiver."""
    sequences: tuple[Natural, ...]
    """The batches; none when only the window changed."""
    window_rows: Natural
    """The window from now on: rows."""
    window_bytes: Natural
    """The window from now on: encoded bytes."""
    window_number: Natural
    """Number of the window."""
    early: tuple[Natural, ...] = ()
    """Rows that the consumer is done with before the rest of their batches, which stay
    unacknowledged and keep their credit: sequence number, first row, number of rows; and so on."""


class Refusal(codec.Message, kw_only=True):
    """Why a receiver takes nothing from this sender."""

    edge: str
    """Name of the edge."""
    reason: str
    """What is wrong, what was found, what to do."""


Message = Hello | Data | Welcome | Ack | Refusal
_CODEC: Codec[Message] = Codec(
    "data", 1, Hello, Data, Welcome, Ack, Refusal, max_bytes=MAX_HEADER_BYTES - SEAL_BYTES
)


def encode_message(message: Message) -> bytes:
    """The header frame of a message."""
    packed = _CODEC.encode(message)
    return packed + xxhash.xxh3_64_digest(packed)


def decode_message(frame: Any) -> Message:
    """The message of a header frame; FrameError for anything that `encode_message` did not make."""
    data = bytes(frame)
    if not SEAL_BYTES < len(data) <= MAX_HEADER_BYTES:
        raise FrameError(
            f"a header frame has the wrong size; got {len(data)} bytes; use one protocol"
        )
    packed, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
    if xxhash.xxh3_64_digest(packed) != seal:
        raise FrameError(
            f"a header is damaged; its seal does not fit its {len(packed)} bytes; send it again"
        )
    return _CODEC.decode(packed)
