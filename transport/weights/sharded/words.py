"""The words of the sharded handshake, between one coordinator (source rank 0) and every rank of both sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transport.weights.protocol import wire
from transport.weights.protocol.messages import Note

WHOLE, DAMAGED, BROKEN = "whole", "damaged", "broken"
"""How a transfer may end: proved; with other bytes than were sent; not at all."""


@dataclass(frozen=True, kw_only=True)
class Enrol:
    """Source rank: I am here. Repeated until `Enrolled`."""

    rank: int
    ranks: int
    """Of the trainer."""
    key: bytes
    """Of its layout."""
    incarnation: int
    """The scheduler's attempt at this rank's process: of two that claim one rank, the later has it."""
    writer: int
    """The coordinator that it belongs to, 0 before the first `Enrolled`."""


@dataclass(frozen=True, kw_only=True)
class Enrolled:
    """Coordinator: you are known."""

    writer: int
    """Names the coordinator; a rank that has met one serves no other: the versions of the two may differ."""
    failure: str
    """As in `Failed`."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Source rank: these versions can be sent; also its sign of life."""

    versions: list[int]


@dataclass(frozen=True, kw_only=True)
class Join:
    """Destination rank: let my group in. Repeated until `Form`."""

    group: str
    """The reader group's name."""
    rank: int
    ranks: int
    """Of the group."""
    incarnation: int
    """The scheduler's attempt at this rank's process: of two that claim one rank, the later has it."""
    attempt: int
    """Counts this rank's joins."""
    writer: int
    """The coordinator that `version` is from, 0 for none."""
    version: int
    """Held already, -1 for none."""
    key: bytes
    """Of the group's layout."""
    layout: dict[str, Any] = field(default_factory=dict)
    """By `Layout.to_plain`; rank 0's alone, empty from the others."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """Coordinator to all ranks of both sides: make a process group for this epoch; source ranks come first."""

    epoch: int
    """Never given twice."""
    group: str
    attempt: int
    """Of the Join that is answered; 0 to a source rank."""
    ranks: int
    """Of the group."""
    sources: int
    """Ranks of the trainer."""
    writer: int
    """Names the coordinator; another one than before means that versions may go back."""
    layout: dict[str, Any]
    """The other side's."""
    store: str
    """File under which the ranks meet."""
    backend: str
    """gloo | nccl."""
    bucket_bytes: int
    """Of a message, at most."""
    deltas: bool = False
    """Before each transfer the receivers tell what version they have, and the senders the size of each delta."""


@dataclass(frozen=True, kw_only=True)
class Formed:
    """Any rank: my part of the process group stands, or why it never will."""

    epoch: int
    fault: str
    """Empty when all is well."""
    mismatch: bool
    """The fault is that the layouts do not fit: trying again is of no use."""


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """Coordinator to destination ranks: the group is in."""

    epoch: int
    note: Note


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Coordinator to all ranks: get ready for this version."""

    epoch: int
    round: int
    version: int


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Any rank: I hold the version until the round ends, or have a buffer for it."""

    epoch: int
    round: int


@dataclass(frozen=True, kw_only=True)
class Gone:
    """Source rank: I do not have the version any more."""

    epoch: int
    round: int
    version: int


@dataclass(frozen=True, kw_only=True)
class Go:
    """Coordinator to all ranks: everybody is ready, transfer."""

    epoch: int
    round: int


@dataclass(frozen=True, kw_only=True)
class Done:
    """Any rank: my part of the transfer has ended."""

    epoch: int
    round: int
    state: str
    """whole | damaged | broken."""
    fault: str
    """What was found, empty when whole."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Coordinator to destination ranks: every rank has its part of this version, proved."""

    epoch: int
    round: int
    version: int
    note: Note


@dataclass(frozen=True, kw_only=True)
class Void:
    """Coordinator to all ranks: the round has ended without a version."""

    epoch: int
    round: int
    fault: str
    """What was found where the version is damaged, else empty."""


@dataclass(frozen=True, kw_only=True)
class Committed:
    """Destination rank: I compute with this version, and a buffer is free again."""

    epoch: int
    version: int


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Destination rank: I am alive."""

    epoch: int
    version: int
    """The version of this coordinator that it computes with, -1 for none."""
    whole: int
    """The version it could adopt, -1 for none."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """Coordinator: I am alive, and this is the newest note."""

    note: Note


@dataclass(frozen=True, kw_only=True)
class Fenced:
    """Coordinator: this epoch is over. Destination ranks join again."""

    epoch: int
    """0 to a source rank: you were given up, enrol again."""
    replaced: bool
    """Another process has taken this rank: do not come back."""


@dataclass(frozen=True, kw_only=True)
class Denied:
    """Coordinator to destination ranks or a source rank: you do not fit, and why."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Coordinator to source ranks: one of them is gone, and nothing can be sent; empty when it is back."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Bye:
    """Any rank: I leave."""

    epoch: int
    """0 from a source rank."""


MemberWord = Enrol | Staged | Join | Formed | Ready | Gone | Done | Committed | Beat | Bye
CoordinatorWord = Enrolled | Form | Welcome | Offer | Go | Whole | Void | Told | Fenced | Denied | Failed
Word = MemberWord | CoordinatorWord

KINDS: dict[str, type[Word]] = wire.kinds(*Word.__args__)


def encode(word: Word) -> bytes:
    """The word as msgpack."""
    return wire.pack(word)


def decode(payload: bytes) -> Word:
    """The word that `encode` wrote; anything else is a MessageError."""
    return wire.unpack(payload, KINDS, "a word of the sharded handshake")
