"""A writer's side of membership: which reader groups are in, under which epoch, at which version,
and who is gone.

Pure: every call takes what happened and the time, and returns the messages to send. A reader is a
group of ranks, often of one. What stands here is the same however bytes move; `segments` and
`rounds` add when a group is offered a version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from transport.weights.protocol.membership import Timing
from transport.weights.protocol.messages import (
    Committed,
    Denied,
    Fenced,
    Join,
    Leave,
    MemberMessage,
    Note,
    ReaderHeartbeat,
    Register,
    SourceHeartbeat,
    Welcome,
    WriterHeartbeat,
    WriterMessage,
)

Outgoing = list[tuple[bytes, WriterMessage]]
"""Messages with the peer that each is for."""
KEPT = 4
"""Versions of which it is known when they were sent: those that readers may still say that they
have taken."""
UNANSWERED = 64
"""Messages that may be on the way to a reader that says nothing; then the writer is silent too."""


class Phase(Enum):
    """Where a group stands, and in part an epoch."""

    GATHERING = "gathering"
    """Ranks join, until all are there."""
    FORMING = "forming"
    """All ranks of both sides make a process group."""
    IDLE = "idle"
    OFFERED = "offered"
    """Ranks are asked to get ready."""
    TRANSFERRING = "transferring"
    VERIFIED = "verified"
    """Every rank has its part, and adopts it."""


STATES = {Phase.OFFERED: "offered", Phase.TRANSFERRING: "taking", Phase.VERIFIED: "taking"}


@dataclass(frozen=True, kw_only=True)
class ReaderStatus:
    """What the writer knows of one reader group."""

    name: str
    """The reader's name."""
    epoch: int
    """The epoch under which it joined."""
    version: int
    """The version of this writer that it said it holds, -1 for none."""
    state: str
    """joined | offered | taking | committed | refused | silent."""
    silent_s: float
    """Seconds since it, or the rank that was silent longest, was last heard."""


@dataclass(frozen=True)
class Sent:
    """What one version has taken, from this writer to one reader group."""

    version: int
    pair_bytes: tuple[tuple[int, ...], ...]
    """[source ranks][ranks of the group]: bytes of weights from each to each; in a segment, those
    written for all."""
    seconds: float
    """From the start of the transfer until every rank of the group had its part, verified. Of a
    segment: of writing."""
    held_s: float = 0.0
    """The longest that a rank's loop was kept by taking it; 0 until one has."""
    whole_bytes: int = 0
    """What these bytes would have been without deltas."""
    committed_s: float = 0.0
    """From that start until this writer heard that every rank of the group computes with it; 0
    until then."""
    taken_s: float = 0.0
    """The longest that a rank itself saw of that: since it began to arrive there."""


@dataclass(kw_only=True)
class MemberRank:
    """A rank of a reader group."""

    peer: bytes
    join: Join
    version: int
    heard: float
    unanswered: int = 0
    """Messages sent to it since."""


@dataclass(kw_only=True)
class Group:
    """A reader group and the phase it is in."""

    name: str
    order: int
    """Groups are listed in the order of joining."""
    seats: dict[int, MemberRank] = field(default_factory=dict)
    incarnations: dict[int, int] = field(default_factory=dict)
    """By rank, the latest that has come."""
    phase: Phase = Phase.GATHERING
    waiting: set[bytes] = field(default_factory=set)
    """Peers whose answer ends the phase."""
    deadline: float = float("inf")
    epoch: int = 0
    round: int = 0
    offered: int = -1
    """The version that was offered last, and when."""
    offered_at: float = float("-inf")
    taking: int = -1
    """The version that it reads."""
    version: int = -1
    """Held by all ranks."""
    refused: int = -1
    """The newest version found damaged."""
    damage: str = ""
    """What was found in the round's version."""
    sent: dict[int, Sequence[int]] = field(default_factory=dict)
    """In this round, by source rank: bytes to each of the group's ranks."""
    whole_bytes: int = 0
    """What these would have been without deltas."""
    began: float = 0.0
    """When the round's transfer started."""
    ready: set[bytes] = field(default_factory=set)
    """Ranks that are ready for the next round."""
    complete_at: float = float("inf")
    """When all ranks were there, while they wait for an epoch."""
    part: int = 0
    """Groups of one part share an epoch."""
    faults: int = 0
    """Epochs in a row that broke, since it last had a version."""

    def enter(self, phase: Phase, waiting: set[bytes], deadline: float = float("inf")) -> None:
        """Go on to the next phase, which ends when all of `waiting` have answered."""
        self.phase, self.waiting, self.deadline = phase, waiting, deadline

    @property
    def is_complete(self) -> bool:
        """Whether all ranks are there."""
        return 0 in self.seats and sorted(self.seats) == list(range(self.seats[0].join.ranks))

    def begin(self, epoch: int) -> None:
        """All ranks are in."""
        versions = {seat.version for seat in self.seats.values()}
        self.epoch, self.round, self.offered, self.taking, self.refused = epoch, 0, -1, -1, -1
        self.version = versions.pop() if len(versions) == 1 else -1
        self.ready = set()
        self.enter(Phase.IDLE, set())

    def end(self) -> None:
        """The epoch is over; ranks that live come again."""
        self.seats, self.epoch, self.version = {}, 0, -1
        self.complete_at = float("inf")
        self.enter(Phase.GATHERING, set())

    def hold(self, seat: MemberRank, version: int) -> None:
        """The seat's rank computes with this version."""
        seat.version = version
        if all(member.version == version for member in self.seats.values()):
            self.version = version

    def answered(self, peer: bytes) -> bool:
        """This peer has answered; whether all have."""
        self.waiting.discard(peer)
        return not self.waiting

    def seat_of(self, peer: bytes) -> MemberRank | None:
        """Where this peer sits."""
        return next((seat for seat in self.seats.values() if seat.peer == peer), None)

    @property
    def peers(self) -> set[bytes]:
        """Of its ranks."""
        return {seat.peer for seat in self.seats.values()}


@dataclass(kw_only=True)
class Epoch:
    """The trainer's ranks and those of some groups, with one process group."""

    number: int
    groups: list[Group]
    phase: Phase = Phase.FORMING
    waiting: set[bytes]
    """Peers whose answer ends the phase."""
    deadline: float
    idle_at: float = 0.0
    """When its last transfer was over."""
    round: int = 0
    version: int = -1
    """That is being transferred, or was last."""
    taking: list[Group] = field(default_factory=list)
    """Groups that take part in the transfer."""
    known: dict[str, bytes] = field(default_factory=dict)
    """By which ranks find each other."""
    asking: dict[str, set[bytes]] = field(default_factory=dict)
    """Peers that wait for one of them."""

    def rest(self, now: float) -> None:
        """It stands, and nothing is under way."""
        self.phase, self.deadline, self.idle_at = Phase.IDLE, float("inf"), now

    @property
    def is_adopting(self) -> bool:
        """Whether some group has a version that it does not compute with yet."""
        return any(group.phase is Phase.VERIFIED for group in self.groups)

    @property
    def peers(self) -> set[bytes]:
        """Of all groups."""
        return set().union(*(group.peers for group in self.groups))

    @property
    def is_sound(self) -> bool:
        """Whether each group has had a version since an epoch of it broke, if one did."""
        return not any(group.faults for group in self.groups)


class Roster(ABC):
    """The present members. Subclasses decide what follows: `_gathered`, `_receive`, and their own
    messages.
    """

    def __init__(self, writer: int, layout: Mapping[str, Any], pace: Timing) -> None:
        """`writer`: its name. `layout`: as sent to readers with their Welcome."""
        self.pace = pace
        self.faults: dict[str, str] = {}
        """What last ended an epoch, by the group's name."""
        self._writer, self._epochs, self._layout = writer, writer, dict(layout)
        self._groups: dict[str, Group] = {}
        self._joined = 0
        self._note: Note = {}
        self._told_at = float("-inf")

    @property
    @abstractmethod
    def newest(self) -> int:
        """The newest version that can be offered, -1 for none."""

    def receive(self, peer: bytes, message: MemberMessage, now: float) -> Outgoing:
        """Answer one message of one rank."""
        if isinstance(message, Join):
            return self._join(peer, message, now)
        if isinstance(message, Register | SourceHeartbeat):
            return []
        group, seat = self._seat(peer)
        if isinstance(message, Leave):
            return self._leave(group, peer) if group else []
        if group is None or seat is None or not message.epoch or group.epoch != message.epoch:
            return [(peer, Fenced(epoch=message.epoch, replaced=False))]
        seat.heard, seat.unanswered = now, 0
        if isinstance(message, Committed | ReaderHeartbeat):
            group.hold(seat, message.version)
        return self._receive(group, peer, message, now)

    def tell(self, note: Note) -> None:
        """Replace the note; it goes out at the next `tick`."""
        self._note = dict(note)
        self._told_at = float("-inf")

    def tick(self, now: float) -> Outgoing:
        """What is due at this time: heartbeats with the note; who was silent for too long is struck
        off.
        """
        seats = [seat for group in self._groups.values() for seat in group.seats.values()]
        gone = [seat.peer for seat in seats if now - seat.heard >= self.pace.gone_s]
        out = [
            reply
            for peer in gone
            for reply in self._strike(peer, f"it has said nothing for {self.pace.gone_s:g} s")
        ]
        if now - self._told_at >= self.pace.heartbeat_s:
            self._told_at = now
            out += self._heartbeats()
        return out

    def lost(self, peer: bytes) -> Outgoing:
        """The transport reports that this peer is gone."""
        return self._strike(peer, "its connection is closed")

    def status(self, now: float) -> tuple[ReaderStatus, ...]:
        """Every reader group, in the order of joining."""
        statuses = []
        for group in sorted(self._groups.values(), key=lambda group: group.order):
            silent_s = max((now - seat.heard for seat in group.seats.values()), default=0.0)
            state = STATES.get(group.phase, "joined")
            if silent_s >= self.pace.silent_s:
                state = "silent"
            elif group.phase is Phase.IDLE:
                phase = "committed" if group.version >= 0 else "joined"
                state = "refused" if 0 <= self.newest == group.refused else phase
            statuses.append(
                ReaderStatus(
                    name=group.name,
                    epoch=group.epoch,
                    version=group.version,
                    state=state,
                    silent_s=silent_s,
                )
            )
        return tuple(statuses)

    # What the ways to move versions add

    @abstractmethod
    def _gathered(self, group: Group, now: float) -> Outgoing:
        """A rank has joined: begin an epoch if the group is complete."""

    @abstractmethod
    def _receive(self, group: Group, peer: bytes, message: MemberMessage, now: float) -> Outgoing:
        """A message of the group's epoch."""

    def _repeated(self, group: Group, seat: MemberRank, now: float) -> Outgoing:
        """A Join has come twice."""
        return []

    def _unfit(self, group: Group, join: Join, now: float) -> str:
        """Why this rank cannot join this group; empty when it can."""
        return ""

    # Ranks come and go

    def _join(self, peer: bytes, join: Join, now: float) -> Outgoing:
        group = self._groups.get(join.group)
        if group is None:
            self._joined += 1
            group = self._groups[join.group] = Group(name=join.group, order=self._joined)
        if join.incarnation < group.incarnations.get(join.rank, join.incarnation):
            # Of a process that was killed, or was frozen while its successor came in.
            return [(peer, Fenced(epoch=0, replaced=True))]
        group.incarnations[join.rank] = join.incarnation
        before = group.seats.get(join.rank)
        if before and before.peer == peer and before.join.attempt == join.attempt:
            before.heard, before.unanswered = now, 0
            return self._repeated(group, before, now)
        if reason := self._unfit(group, join, now):
            if not group.seats:
                del self._groups[group.name]
            return [(peer, Denied(reason=reason))]
        out: Outgoing = []
        if before and before.peer != peer:
            out.append((before.peer, Fenced(epoch=group.epoch, replaced=True)))
            del group.seats[join.rank]
        out += self._fence(group)
        version = join.version if join.writer == self._writer else -1
        group.seats[join.rank] = MemberRank(peer=peer, join=join, version=version, heard=now)
        return out + self._gathered(group, now)

    def _next_epoch(self) -> int:
        self._epochs += 1
        return self._epochs

    def _begin(self, group: Group, epoch: int) -> Outgoing:
        """The group is in this epoch."""
        group.begin(epoch)
        return [(seat.peer, self._welcome(group, seat)) for seat in group.seats.values()]

    def _welcome(self, group: Group, seat: MemberRank) -> Welcome:
        return Welcome(
            attempt=seat.join.attempt,
            epoch=group.epoch,
            writer=self._writer,
            layout=self._layout,
            note=self._note,
        )

    def _heartbeats(self) -> Outgoing:
        out: Outgoing = []
        for group in self._groups.values():
            for seat in group.seats.values():
                out += self._to(seat, WriterHeartbeat(epoch=group.epoch, note=self._note))
        return out

    def _to(self, seat: MemberRank, message: WriterMessage) -> Outgoing:
        """The message, unless too many are on the way to it."""
        if seat.unanswered >= UNANSWERED:
            return []
        seat.unanswered += 1
        return [(seat.peer, message)]

    def _leave(self, group: Group, peer: bytes) -> Outgoing:
        """Remove the rank and end the epoch; the others join again."""
        group.seats = {rank: seat for rank, seat in group.seats.items() if seat.peer != peer}
        out = self._fence(group)
        if not group.seats:
            self._groups.pop(group.name, None)
        return out

    def _strike(self, peer: bytes, why: str) -> Outgoing:
        group, _ = self._seat(peer)
        if group is None:
            return []
        self.faults[group.name] = f"a rank is gone: {why}"
        return [(peer, Fenced(epoch=group.epoch, replaced=False)), *self._leave(group, peer)]

    def _fence(self, group: Group) -> Outgoing:
        """End the group's epoch; its ranks that live join again, under the next one."""
        if not group.epoch:
            return []
        peers, fenced = group.peers, Fenced(epoch=group.epoch, replaced=False)
        group.end()
        return [(peer, fenced) for peer in sorted(peers)]

    def _seat(self, peer: bytes) -> tuple[Group | None, MemberRank | None]:
        for group in self._groups.values():
            if seat := group.seat_of(peer):
                return group, seat
        return None, None
