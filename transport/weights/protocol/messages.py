"""The messages between a writer of weights and its readers: one frozen class each, whatever moves
the bytes.

Every way of moving versions knows the same members and the same life of a version: Join -> Welcome,
then Offer -> Ready -> the transfer -> Committed. The last two sections are of collective rounds,
where many ranks send to many.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from transport import codec
from transport.codec import Codec, field

Note = dict[str, int | float | str]
"""A few small facts that the writer tells all its readers; the newest replaces the one before."""
MESSAGE_BYTES = 256 << 20
"""The largest message; a layout of 100,000 tensors is about 10 MB, over 1,024 ranks 20 MB."""
WHOLE, DAMAGED, BROKEN, WITHDRAWN = "whole", "damaged", "broken", "withdrawn"
"""How a transfer may end: verified; with other bytes than were sent; not at all; not at all, as a
source rank has the version no longer."""


# Members


class Join(codec.Message, kw_only=True):
    """Reader: let my group in. Repeated until `Welcome`."""

    group: str
    """The reader's name, unique among the live readers of one writer; all ranks of one reader share
    it."""
    rank: int = 0
    ranks: int = 1
    """Of the group."""
    incarnation: int
    """The scheduler's attempt at this rank's process: of two that claim one rank, the later has
    it."""
    attempt: int
    """Counts this rank's joins; a repeated Join carries the same number."""
    writer: int
    """The writer that `version` is from, 0 for none."""
    version: int
    """The version it holds already, -1 for none."""
    key: bytes = b""
    """Of the group's layout, in rounds."""
    layout: dict[str, Any] = field(default_factory=dict)
    """By `Layout.to_plain`, in rounds; rank 0's alone, empty from the others."""


class Welcome(codec.Message, kw_only=True):
    """Writer: the group is in, under this epoch."""

    attempt: int
    """Of the Join that is answered."""
    epoch: int
    """Stands on every later message of this group; never given twice."""
    writer: int
    """Names this writer; another number means that it was restarted: its versions are taken
    whatever their numbers."""
    layout: dict[str, Any]
    """The writer's, by `FlatLayout.to_plain`; empty in rounds, where `FormGroup` has it."""
    note: Note = field(default_factory=dict)
    """The writer's newest note."""


class ReaderHeartbeat(codec.Message, kw_only=True):
    """Reader: I am alive."""

    epoch: int
    version: int
    """The version of this writer that it computes with, -1 for none."""
    verified: int = -1
    """The version of a round that it could adopt, -1 for none."""


class WriterHeartbeat(codec.Message, kw_only=True):
    """Writer: I am alive, and this is my newest note."""

    epoch: int
    """The group's; 0 to a group that is not complete, and to source ranks."""
    note: Note


class Fenced(codec.Message, kw_only=True):
    """Writer: this epoch is over."""

    epoch: int
    """The epoch that ended; 0 to a reader that is not in, and to a source rank that was given
    up."""
    replaced: bool
    """True when another process has the name, or the rank: do not come back. False: join again."""


class Denied(codec.Message, kw_only=True):
    """Writer: you do not fit, and why."""

    reason: str


class Leave(codec.Message, kw_only=True):
    """Reader or source rank: I go."""

    epoch: int
    """0 from a source rank."""


# Versions


class Upcoming(codec.Message, kw_only=True):
    """Writer: this version is being written into this segment; its bytes may be read behind the
    watermark.
    """

    epoch: int
    version: int
    """On its way; it may never be offered."""
    segment: str
    """Key of the buffer."""


class Offer(codec.Message, kw_only=True):
    """Writer: this version may be taken."""

    epoch: int
    version: int
    segment: str = ""
    """Key of the buffer that holds it; empty in rounds."""
    sums: bytes = b""
    """wordsum (transport/native) of each tensor in the layout's order, 8 bytes each, little-endian;
    empty in rounds."""
    digests: bytes = b""
    """xxh3_64 of each, in the same form; empty unless the writer was asked for them."""
    note: Note = field(default_factory=dict)
    """The writer's newest note."""


class Ready(codec.Message, kw_only=True):
    """Reader: I am in the segment of this version. In rounds: I have a buffer for whatever the
    round brings.
    """

    epoch: int
    version: int = -1
    """-1: whatever the next round brings."""
    round: int = 0
    """The last one that I took part in, in rounds; 0 for none in this epoch."""


class Committed(codec.Message, kw_only=True):
    """Reader: I compute with this version, and the memory of the one before is free."""

    epoch: int
    version: int
    held_s: float = 0.0
    """How long taking it has kept the rank's loop, in rounds."""
    taken_s: float = 0.0
    """Since it began to arrive here, or in a segment was offered: until the rank computed with
    it."""


class Refused(codec.Message, kw_only=True):
    """Reader: this version is damaged, I keep the one before."""

    epoch: int
    version: int
    reason: str
    """What was found."""


# Rounds: the ranks that send


class Register(codec.Message, kw_only=True):
    """Source rank: I am here. Repeated until `Registered`."""

    rank: int
    ranks: int
    """Of the trainer."""
    key: bytes
    """Of its layout."""
    incarnation: int
    """As in `Join`."""
    writer: int
    """The coordinator that it belongs to, 0 before the first `Registered`."""


class Registered(codec.Message, kw_only=True):
    """Coordinator: you are known."""

    writer: int
    """Names the coordinator; a rank that has met one serves no other: the versions of the two may
    differ."""
    failure: str
    """As in `SourceFailed`."""


class SourceHeartbeat(codec.Message, kw_only=True):
    """Source rank: I am alive, and these versions can be sent."""

    versions: list[int]


class SourceFailed(codec.Message, kw_only=True):
    """Coordinator to source ranks: one of them is gone, and nothing can be sent; empty when it is
    back.
    """

    reason: str


# Rounds: groups and transfers


class EpochReader(codec.Message, kw_only=True):
    """A reader in an epoch."""

    name: str
    ranks: int
    layout: int
    """Number of its layout in the epoch."""


class FormGroup(codec.Message, kw_only=True):
    """Coordinator to all ranks of an epoch: make one process group. The trainer's ranks come first,
    then those of each reader.
    """

    epoch: int
    sources: int
    """Ranks of the trainer."""
    readers: list[EpochReader]
    layouts: list[dict[str, Any]]
    """The trainer's, and the unlike ones of readers."""
    store: str
    """File under which the ranks meet; empty: they meet over this line (`Put`, `GetValue`,
    `StoredValue`)."""
    backend: str
    """gloo | nccl."""
    bucket_bytes: int
    """Of one chunk, at most."""
    deltas: bool = False
    """Before each transfer the receivers tell what version they have, and the senders the size of
    each delta."""

    @property
    def columns(self) -> dict[str, range]:
        """By reader: its ranks among those of all readers."""
        ends = accumulate(reader.ranks for reader in self.readers)
        return {
            reader.name: range(end - reader.ranks, end)
            for reader, end in zip(self.readers, ends, strict=True)
        }

    @property
    def size(self) -> int:
        """Of the process group."""
        return self.sources + sum(reader.ranks for reader in self.readers)


class FormResult(codec.Message, kw_only=True):
    """Any rank: my part of the process group stands, or why it never will."""

    epoch: int
    fault: str
    """Empty when all is well."""
    misfit: str = ""
    """The reader whose layout does not fit, if that is the fault: trying again is of no use."""


class Put(codec.Message, kw_only=True):
    """Any rank: a value by which others find me."""

    epoch: int
    key: str
    value: bytes


class GetValue(codec.Message, kw_only=True):
    """Any rank: tell me this value as soon as somebody has put it."""

    epoch: int
    key: str


class StoredValue(codec.Message, kw_only=True):
    """Coordinator: it is this."""

    epoch: int
    key: str
    value: bytes


class StartTransfer(codec.Message, kw_only=True):
    """Coordinator: every source rank has this version, and the ranks of these readers have room for
    it. To all of them.
    """

    epoch: int
    round: int
    """Counts the transfers of an epoch."""
    version: int
    readers: list[str]


class TransferResult(codec.Message, kw_only=True):
    """Any rank: my part of the transfer has ended."""

    epoch: int
    round: int
    state: str
    """whole | damaged | broken | withdrawn."""
    fault: str
    """What was found, empty when whole."""
    sent: list[int] = field(default_factory=list)
    """Of a source rank: bytes of weights, by rank of the epoch's readers."""
    whole: list[int] = field(default_factory=list)
    """Of a source rank: what these would have been without deltas."""


class Verified(codec.Message, kw_only=True):
    """Coordinator to destination ranks: every rank has its part of this version, and its checksums
    are right.
    """

    epoch: int
    round: int
    version: int
    note: Note


class RoundAborted(codec.Message, kw_only=True):
    """Coordinator to destination ranks: the round has ended without a version."""

    epoch: int
    round: int
    fault: str
    """What was found where the version is damaged, else empty."""


ReaderMessage = (
    Join
    | ReaderHeartbeat
    | Ready
    | Committed
    | Refused
    | FormResult
    | Put
    | GetValue
    | TransferResult
    | Leave
)
SourceMessage = Register | SourceHeartbeat | FormResult | Put | GetValue | TransferResult | Leave
MemberMessage = ReaderMessage | SourceMessage
GroupMessage = (
    WriterHeartbeat
    | Upcoming
    | Offer
    | FormGroup
    | StoredValue
    | StartTransfer
    | Verified
    | RoundAborted
)
"""Of a writer, to the members of an epoch."""
WriterMessage = GroupMessage | Welcome | Fenced | Denied | Registered | SourceFailed
Message = MemberMessage | WriterMessage

CODEC: Codec[Message] = Codec("weights", 2, *Message.__args__, max_bytes=MESSAGE_BYTES)
