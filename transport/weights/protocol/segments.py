"""Versions in segments of shared memory: which may be written next, who is offered what, who had
its time.

A reader of one rank takes the newest version at its own pace. A lost message costs time, never
safety: whoever is in a segment holds its gate (`ports`), and the writer writes behind a sealed gate
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from transport.weights.protocol.membership import GroupMember, Timing
from transport.weights.protocol.messages import (
    Committed,
    GroupMessage,
    Join,
    MemberMessage,
    Offer,
    ReaderHeartbeat,
    ReaderMessage,
    Ready,
    Refused,
    Upcoming,
    Welcome,
)
from transport.weights.protocol.roster import KEPT, Group, MemberRank, Outgoing, Phase, Roster, Sent


@dataclass(frozen=True)
class _Written:
    """How a version came into its segment."""

    began: float
    seconds: float
    nbytes: int


class SegmentOffers(Roster):
    """The writer's side: who is in, what is offered, and which segment may be written next."""

    def __init__(self, layout: Mapping[str, Any], writer: int, pace: Timing | None = None) -> None:
        super().__init__(writer, layout, pace or Timing())
        self.segments: dict[str, int] = {}
        """Segments in use, at most two, with the version in each (-1: none that is whole)."""
        self.abandoned: dict[str, int] = {}
        """Segments left to a reader that would not leave, until `freed`."""
        self.front: Offer | None = None
        """The newest version, as a late joiner is offered it."""
        self._blocked_at: float | None = None
        self._written: dict[int, _Written] = {}
        self._sent: dict[str, Sent] = {}

    @property
    def sent(self) -> dict[str, Sent]:
        """By reader that is known, of the newest version that it has taken."""
        return {name: sent for name, sent in self._sent.items() if name in self._groups}

    @property
    def newest(self) -> int:
        """The newest version that can be offered, -1 for none."""
        return self.front.version if self.front else -1

    # Segments

    def order(self) -> list[str | None]:
        """Segments to try to seal for the next version, best first; None stands for a new one."""
        front = self.front.segment if self.front else None
        old = sorted((key for key in self.segments if key != front), key=self.segments.__getitem__)
        return [*old, *([None] if len(self.segments) < 2 else []), *([front] if front else [])]

    def blocked(self, now: float) -> str | None:
        """No segment could be sealed: the one to abandon, if the readers have had their time."""
        if self._blocked_at is None:
            self._blocked_at = now
        return self.order()[0] if now - self._blocked_at >= self.pace.release_s else None

    def abandon(self, segment: str) -> Outgoing:
        """Leave a segment to those who are in it, for good; they are fenced off and may join
        again.
        """
        version = self.abandoned[segment] = self.segments.pop(segment)
        groups = list(self._groups.values()) if version >= 0 else []
        inside = [group for group in groups if version in (group.version, group.taking)]
        return [reply for group in inside for reply in self._drop(group)]

    def freed(self, segment: str) -> None:
        """The last reader has left an abandoned segment."""
        self.abandoned.pop(segment, None)

    def writing(self, segment: str) -> None:
        """The segment's gate is sealed: its old content is gone."""
        self._blocked_at = None
        self.segments[segment] = -1
        if self.front and self.front.segment == segment:
            self.front = None

    def upcoming(self, segment: str, version: int) -> Outgoing:
        """The segment is being filled with this version: tell readers that could read along."""
        out: Outgoing = []
        for group in self._groups.values():
            out += self._to(
                group.seats[0], Upcoming(epoch=group.epoch, version=version, segment=segment)
            )
        return out

    def written(
        self,
        segment: str,
        version: int,
        sums: bytes,
        digests: bytes,
        now: float,
        seconds: float = 0.0,
        nbytes: int = 0,
    ) -> Outgoing:
        """The segment holds this version whole, and its gate is open: offer it to every reader.
        seconds, nbytes: that writing it has taken.
        """
        recent = list(self._written.items())[1 - KEPT :]
        self._written = {**dict(recent), version: _Written(now - seconds, seconds, nbytes)}
        self.segments[segment] = version
        self.front = Offer(epoch=0, version=version, segment=segment, sums=sums, digests=digests)
        return [reply for group in self._groups.values() for reply in self._offer(group, now)]

    # Readers

    def _gathered(self, group: Group, now: float) -> Outgoing:
        return [*self._begin(group, self._next_epoch()), *self._offer(group, now)]

    def _unfit(self, group: Group, join: Join, now: float) -> str:
        alone = (join.rank, join.ranks) == (0, 1)
        member = f"rank {join.rank} of {join.ranks}"
        return (
            ""
            if alone
            else (
                f"this writer serves readers of one rank; found {member}; open both ends by one"
                " executor"
            )
        )

    def _repeated(self, group: Group, seat: MemberRank, now: float) -> Outgoing:
        return [(seat.peer, self._welcome(group, seat)), *self._offer(group, now)]

    def _receive(self, group: Group, peer: bytes, message: MemberMessage, now: float) -> Outgoing:
        match message:
            case Ready():
                group.taking = message.version
                group.enter(Phase.TRANSFERRING, {peer})
            case Committed():
                group.taking = -1
                group.enter(Phase.IDLE, set())
                if (of := self._written.get(message.version)) is not None:
                    self._sent[group.name] = Sent(
                        message.version,
                        ((of.nbytes,),),
                        of.seconds,
                        whole_bytes=of.nbytes,
                        committed_s=now - of.began,
                        taken_s=message.taken_s,
                    )
            case Refused():
                group.taking, group.refused = -1, message.version
                group.enter(Phase.IDLE, set())
            case ReaderHeartbeat() if (
                self._behind(group) and now - group.offered_at >= self.pace.heartbeat_s
            ):
                return self._offer(group, now)
        if isinstance(message, Ready | Committed) and message.version in self.abandoned.values():
            return self._drop(group)
        return []

    def _offer(self, group: Group, now: float) -> Outgoing:
        if self.front is None:
            return []
        group.offered_at = now
        if group.phase is not Phase.TRANSFERRING and self._behind(group):
            group.enter(Phase.OFFERED, group.peers)
        return self._to(group.seats[0], replace(self.front, epoch=group.epoch, note=self._note))

    def _behind(self, group: Group) -> bool:
        return self.front is not None and self.front.version not in (group.version, group.refused)

    def _drop(self, group: Group) -> Outgoing:
        """The reader is in a segment that is left to it: it has to join again."""
        del self._groups[group.name]
        return self._fence(group)


class SegmentReader(GroupMember):
    """A reader's side: whether it is in, which version it holds, and which it may take."""

    def __init__(self, name: str, pace: Timing | None = None, *, incarnation: int = 0) -> None:
        """`incarnation`: as in `Join`."""
        super().__init__(
            Join(group=name, incarnation=incarnation, attempt=1, writer=0, version=-1),
            pace or Timing(),
        )
        self.offer: Offer | None = None
        """The newest version that may be taken and has not been."""
        self.upcoming: Upcoming | None = None
        """A newer one that is being written, as far as is known."""
        self.layout: Mapping[str, object] | None = None
        """The writer's layout, by `FlatLayout.to_plain`, once welcome."""
        self._floor = -1

    def _welcomed(self, message: Welcome) -> list[ReaderMessage]:
        if message.writer != self._writer:
            self._floor, self.offer, self.upcoming = -1, None, None
        self.layout = message.layout
        return []

    def _ended(self) -> list[ReaderMessage]:
        self.offer = self.upcoming = None
        return []

    def _receive(self, message: GroupMessage) -> list[ReaderMessage]:
        match message:
            case Offer():
                self.note = message.note
                if self._newer(message.version):
                    self.offer = message
                if self.upcoming and self.upcoming.version <= message.version:
                    self.upcoming = None
            case Upcoming() if self._newer(message.version):
                self.upcoming = message
        return []

    def entered(self, offer: Offer) -> Ready:
        """The reader is in the offer's segment."""
        return Ready(epoch=self.epoch, version=offer.version)

    def withdrawn(self, offer: Offer) -> None:
        """The offer's segment holds something else by now; a newer offer is on its way."""
        if self.offer and self.offer.version <= offer.version:
            self.offer = None

    def committed(self, offer: Offer, taken_s: float = 0.0) -> Committed:
        """The reader computes with the offer's version from now on, this long after it first heard
        of it.
        """
        self._floor = offer.version
        self.hold(offer.version, self._writer)
        self.withdrawn(offer)
        return Committed(epoch=self.epoch, version=offer.version, taken_s=taken_s)

    def refused(self, offer: Offer, reason: str) -> Refused:
        """The offer's version is damaged; neither it nor an older one is taken any more."""
        self._floor = max(self._floor, offer.version)
        self.withdrawn(offer)
        return Refused(epoch=self.epoch, version=offer.version, reason=reason)

    def _newer(self, version: int) -> bool:
        return version > max(self._floor, self.offer.version if self.offer else -1)
