"""The words of the weight handshake, as plain frozen values, and their msgpack form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transport.weights.protocol import wire

Note = dict[str, int | float | str]
"""A few small facts that the writer tells all its readers; the newest replaces the one before."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Reader: let me in."""

    name: str
    """The reader's name, unique among the live readers of one writer."""
    incarnation: int
    """The scheduler's attempt at the reader's process: of two with one name the later is let in."""
    attempt: int
    """Counts the reader's joins; a repeated Hello of one join carries the same number."""
    writer: int
    """The writer that `version` is from, 0 for none."""
    version: int
    """The version it holds already, -1 for none."""


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """Writer: you are in, under this epoch."""

    attempt: int
    """The attempt of the Hello that is answered."""
    epoch: int
    """Stands on every later message of this reader; never given twice."""
    writer: int
    """Names this writer; another number means that it was restarted: its versions are taken whatever their numbers."""
    layout: dict[str, Any]
    """The layout, by `FlatLayout.to_plain`."""
    note: Note = field(default_factory=dict)
    """The writer's newest note."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Writer: this version may be taken from this segment."""

    epoch: int
    """The reader's epoch."""
    version: int
    """The version offered."""
    segment: str
    """Key of the buffer that holds it."""
    sums: bytes
    """wordsum (transport/native) of each tensor in the layout's order, 8 bytes each, little-endian."""
    digests: bytes = b""
    """xxh3_64 of each, in the same form; empty unless the writer was asked for them."""
    note: Note = field(default_factory=dict)
    """The writer's newest note."""


@dataclass(frozen=True, kw_only=True)
class Coming:
    """Writer: this version is being written into this segment; its bytes may be read behind the watermark."""

    epoch: int
    """The reader's epoch."""
    version: int
    """The version that is on its way; it may never be offered."""
    segment: str
    """Key of the buffer."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Reader: I am in the segment of this version."""

    epoch: int
    """The reader's epoch."""
    version: int
    """The version it takes."""


@dataclass(frozen=True, kw_only=True)
class Committed:
    """Reader: I compute with this version, and have left the one before."""

    epoch: int
    """The reader's epoch."""
    version: int
    """The version it holds."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Reader: this version is damaged, I keep the one before."""

    epoch: int
    """The reader's epoch."""
    version: int
    """The version refused."""
    reason: str
    """What was found."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Reader: I am alive."""

    epoch: int
    """The reader's epoch."""
    version: int
    """The version it holds, -1 for none."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """Writer: I am alive, and this is my newest note."""

    epoch: int
    """The reader's epoch."""
    note: Note
    """The writer's newest note."""


@dataclass(frozen=True, kw_only=True)
class Fenced:
    """Writer: this epoch is over."""

    epoch: int
    """The epoch that ended; 0 to a reader that is refused because a younger one has its name."""
    replaced: bool
    """True when another reader took the name: do not come back. False: say Hello again."""


@dataclass(frozen=True, kw_only=True)
class Bye:
    """Reader: I leave."""

    epoch: int
    """The reader's epoch."""


ReaderMessage = Hello | Ready | Committed | Refused | Beat | Bye
WriterMessage = Welcome | Coming | Offer | Told | Fenced
Message = ReaderMessage | WriterMessage

KINDS: dict[str, type[Message]] = wire.kinds(
    Hello, Welcome, Coming, Offer, Ready, Committed, Refused, Beat, Told, Fenced, Bye
)


def encode(message: Message) -> bytes:
    """The message as msgpack."""
    return wire.pack(message)


def decode(payload: bytes) -> Message:
    """The message that `encode` wrote; anything else is a MessageError."""
    return wire.unpack(payload, KINDS, "a weight message")
