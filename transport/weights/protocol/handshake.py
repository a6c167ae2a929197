"""Offer -> Ready -> transfer -> Committed: what writer and readers may do next, without sockets or clocks.

Both ends take values (a message, the time in seconds) and return the messages to send. A lost message costs
time, never safety: whoever is in a segment holds its gate (ports.py), and the writer writes behind a sealed
gate alone. What stands here decides which segment to try, whom to tell, and when a reader has had its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from transport.weights.protocol.messages import (
    Beat,
    Bye,
    Coming,
    Committed,
    Fenced,
    Hello,
    Note,
    Offer,
    ReaderMessage,
    Ready,
    Refused,
    Told,
    Welcome,
    WriterMessage,
)

Outgoing = list[tuple[bytes, WriterMessage]]
"""Messages with the peer that each is for."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How often the two ends speak, and how long the writer waits; all in seconds."""

    beat_s: float = 0.5
    """Between two signs of life, in both directions."""
    silent_s: float = 3.0
    """After that long without a word a reader is called silent."""
    fence_s: float = 5.0
    """A waiting version gives the readers this long to leave a segment before it is abandoned to them."""
    forget_s: float = 120.0
    """After that long without a word a reader is struck off; it may join again."""


@dataclass(frozen=True, kw_only=True)
class ReaderStatus:
    """What the writer knows of one reader."""

    name: str
    """The reader's name."""
    epoch: int
    """The epoch under which it joined."""
    version: int
    """The version of this writer that it said it holds, -1 for none."""
    state: str
    """joined | offered | taking | committed | refused | silent."""
    silent_s: float
    """Seconds since it was last heard."""


@dataclass(kw_only=True)
class _Seat:
    name: str
    incarnation: int
    attempt: int
    epoch: int
    version: int
    heard: float
    state: str = "joined"
    taking: int = -1
    refused: int = -1
    asked: float = 0.0
    unanswered: int = 0


UNANSWERED = 64
"""Messages that may be on the way to a reader that says nothing; then the writer is silent too."""


class WriterHandshake:
    """The writer's side: who is in, what is offered, and which segment may be written next."""

    def __init__(self, layout: dict[str, object], writer: int, pace: Pace | None = None) -> None:
        self.pace = pace or Pace()
        self.segments: dict[str, int] = {}
        """Segments in use, at most two, with the version in each (-1: none that is whole)."""
        self.abandoned: dict[str, int] = {}
        """Segments left to a reader that would not leave, until `freed`."""
        self.front: Offer | None = None
        """The newest version, as a late joiner is offered it."""
        self._layout = layout
        self._writer = writer
        self._epochs = writer
        self._seats: dict[bytes, _Seat] = {}
        self._note: Note = {}
        self._told_at = float("-inf")
        self._blocked_at: float | None = None

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
        return self.order()[0] if now - self._blocked_at >= self.pace.fence_s else None

    def abandon(self, segment: str, now: float) -> Outgoing:
        """Leave a segment to those who are in it, for good; they are fenced off and may join again."""
        version = self.abandoned[segment] = self.segments.pop(segment)
        inside = [peer for peer, seat in self._seats.items() if version >= 0 and version in (seat.version, seat.taking)]
        return [(peer, self._fence(peer, now)) for peer in inside]

    def freed(self, segment: str) -> None:
        """The last reader has left an abandoned segment."""
        self.abandoned.pop(segment, None)

    def writing(self, segment: str) -> None:
        """The segment's gate is sealed: whatever it held is gone."""
        self._blocked_at = None
        self.segments[segment] = -1
        if self.front and self.front.segment == segment:
            self.front = None

    def coming(self, segment: str, version: int) -> Outgoing:
        """The segment is being filled with this version: tell those who could read along."""
        out: Outgoing = []
        for peer, seat in self._seats.items():
            if self._may_send(seat):
                seat.unanswered += 1
                out.append((peer, Coming(epoch=seat.epoch, version=version, segment=segment)))
        return out

    def written(self, segment: str, version: int, sums: bytes, digests: bytes, now: float) -> Outgoing:
        """The segment holds this version whole, and its gate is open: offer it to every reader."""
        self.segments[segment] = version
        self.front = Offer(epoch=0, version=version, segment=segment, sums=sums, digests=digests)
        return [(peer, self._offer(seat, now)) for peer, seat in self._seats.items() if self._may_send(seat)]

    # Readers

    def receive(self, peer: bytes, message: ReaderMessage, now: float) -> Outgoing:
        """Answer one message of one reader."""
        seat = self._seats.get(peer)
        if isinstance(message, Hello):
            return self._join(peer, seat, message, now)
        if seat is None:
            return [] if isinstance(message, Bye) else [(peer, Fenced(epoch=message.epoch, replaced=False))]
        if message.epoch != seat.epoch:
            return []
        seat.heard, seat.unanswered = now, 0
        match message:
            case Ready():
                seat.taking, seat.state = message.version, "taking"
            case Committed():
                seat.version, seat.taking, seat.state = message.version, -1, "committed"
            case Refused():
                seat.refused, seat.taking, seat.state = message.version, -1, "refused"
            case Beat():
                seat.version = message.version
                if self._behind(seat) and now - seat.asked >= self.pace.beat_s:
                    return [(peer, self._offer(seat, now))]
            case Bye():
                del self._seats[peer]
        if isinstance(message, Ready | Committed) and message.version in self.abandoned.values():
            return [(peer, self._fence(peer, now))]
        return []

    def tell(self, note: Note) -> None:
        """Replace the note; it goes out at the next `tick`."""
        self._note = dict(note)
        self._told_at = float("-inf")

    def tick(self, now: float) -> Outgoing:
        """What is due at this time: signs of life and the note; readers long silent are struck off."""
        for peer in [p for p, s in self._seats.items() if now - s.heard >= self.pace.forget_s]:
            del self._seats[peer]
        if now - self._told_at < self.pace.beat_s:
            return []
        self._told_at = now
        out: Outgoing = []
        for peer, seat in self._seats.items():
            if self._may_send(seat):
                seat.unanswered += 1
                out.append((peer, Told(epoch=seat.epoch, note=self._note)))
        return out

    def lost(self, peer: bytes) -> None:
        """The transport says that this peer is gone."""
        self._seats.pop(peer, None)

    def status(self, now: float) -> tuple[ReaderStatus, ...]:
        """Every reader, in the order of joining."""
        return tuple(
            ReaderStatus(
                name=seat.name,
                epoch=seat.epoch,
                version=seat.version,
                state="silent" if now - seat.heard >= self.pace.silent_s else seat.state,
                silent_s=now - seat.heard,
            )
            for seat in sorted(self._seats.values(), key=lambda seat: seat.epoch)
        )

    def _join(self, peer: bytes, seat: _Seat | None, hello: Hello, now: float) -> Outgoing:
        out: Outgoing = []
        others = [p for p, s in self._seats.items() if s.name == hello.name and p != peer]
        if any(self._seats[other].incarnation > hello.incarnation for other in others):
            # Words of a reader that was killed, or has slept, while its successor came in.
            return [(peer, Fenced(epoch=0, replaced=True))]
        if seat is None or seat.attempt != hello.attempt:
            out += [(other, Fenced(epoch=self._seats.pop(other).epoch, replaced=True)) for other in others]
            self._epochs += 1
            held = hello.version if hello.writer == self._writer else -1
            seat = self._seats[peer] = _Seat(
                name=hello.name,
                incarnation=hello.incarnation,
                attempt=hello.attempt,
                epoch=self._epochs,
                version=held,
                heard=now,
            )
        seat.heard, seat.unanswered = now, 0
        out.append(
            (
                peer,
                Welcome(
                    attempt=hello.attempt,
                    epoch=seat.epoch,
                    writer=self._writer,
                    layout=self._layout,
                    note=self._note,
                ),
            )
        )
        if self.front:
            out.append((peer, self._offer(seat, now)))
        return out

    def _offer(self, seat: _Seat, now: float) -> Offer:
        assert self.front is not None
        seat.asked = now
        seat.unanswered += 1
        if seat.state not in ("taking", "refused"):
            seat.state = "offered" if self._behind(seat) else "committed"
        return replace(self.front, epoch=seat.epoch, note=self._note)

    def _behind(self, seat: _Seat) -> bool:
        front = self.front
        return front is not None and front.version not in (seat.version, seat.refused)

    def _may_send(self, seat: _Seat) -> bool:
        return seat.unanswered < UNANSWERED

    def _fence(self, peer: bytes, now: float) -> Fenced:
        return Fenced(epoch=self._seats.pop(peer).epoch, replaced=False)


class ReaderHandshake:
    """A reader's side: whether it is in, which version it holds, and which it may take."""

    def __init__(self, name: str, pace: Pace | None = None, *, incarnation: int = 0) -> None:
        """`incarnation`: as in `Hello`."""
        self.name = name
        self.pace = pace or Pace()
        self.version = -1
        """The version held, -1 for none."""
        self.epoch = 0
        """The epoch of this join, 0 before the first Welcome."""
        self.offer: Offer | None = None
        """The newest version that may be taken and has not been."""
        self.coming: Coming | None = None
        """A newer one that is being written, as far as is known."""
        self.layout: Mapping[str, object] | None = None
        """The writer's layout, by `FlatLayout.to_plain`, once welcome."""
        self.note: Note = {}
        """The writer's newest note."""
        self.joined = False
        """Whether the writer has let this reader in, and not fenced it off since."""
        self.replaced = False
        """Whether another reader took the name; then this one stays out."""
        self.heard = float("-inf")
        """When the writer was last heard, in seconds."""
        self._incarnation, self._attempt = incarnation, 1
        self._writer = self._source = 0
        """Of this join; and the one that `version` is from, 0 for none."""
        self._floor = -1
        self._sent = float("-inf")

    def receive(self, message: WriterMessage, now: float) -> list[ReaderMessage]:
        """Take in one message of the writer; what to answer."""
        match message:
            case Welcome() if message.attempt == self._attempt and not self.replaced:
                if message.writer != self._writer:
                    self._writer, self._floor, self.offer, self.coming = message.writer, -1, None, None
                self.joined, self.epoch, self.heard = True, message.epoch, now
                self.layout, self.note = message.layout, message.note
            case Offer() if self.joined and message.epoch == self.epoch:
                self.heard, self.note = now, message.note
                if self._newer(message.version):
                    self.offer = message
                if self.coming and self.coming.version <= message.version:
                    self.coming = None
            case Coming() if self.joined and message.epoch == self.epoch:
                self.heard = now
                if self._newer(message.version):
                    self.coming = message
            case Told() if self.joined and message.epoch == self.epoch:
                self.heard, self.note = now, message.note
            case Fenced() if (message.epoch == self.epoch) if self.joined else message.replaced:
                self.heard, self.joined, self.offer, self.coming = now, False, None, None
                self.replaced = message.replaced
                self._attempt += 1
                self._sent = float("-inf")
                return self.tick(now)
        return []

    def tick(self, now: float) -> list[ReaderMessage]:
        """What is due at this time: a Hello until welcome, a Beat from then on."""
        if self.replaced or now - self._sent < self.pace.beat_s:
            return []
        self._sent = now
        if self.joined:
            return [Beat(epoch=self.epoch, version=self.version if self._source == self._writer else -1)]
        return [
            Hello(
                name=self.name, incarnation=self._incarnation, attempt=self._attempt, writer=self._source,
                version=self.version,
            )
        ]  # fmt: skip

    def entered(self, offer: Offer) -> Ready:
        """The reader is in the offer's segment."""
        return Ready(epoch=self.epoch, version=offer.version)

    def withdrawn(self, offer: Offer) -> None:
        """The offer's segment holds something else by now; a newer offer is on its way."""
        self._drop(offer)

    def committed(self, offer: Offer) -> Committed:
        """The reader computes with the offer's version from now on."""
        self.version = self._floor = offer.version
        self._source = self._writer
        self._drop(offer)
        return Committed(epoch=self.epoch, version=offer.version)

    def refused(self, offer: Offer, reason: str) -> Refused:
        """The offer's version is damaged; neither it nor an older one is taken any more."""
        self._floor = max(self._floor, offer.version)
        self._drop(offer)
        return Refused(epoch=self.epoch, version=offer.version, reason=reason)

    def leaving(self) -> Bye:
        """The reader goes."""
        return Bye(epoch=self.epoch)

    def _newer(self, version: int) -> bool:
        return version > max(self._floor, self.offer.version if self.offer else -1)

    def _drop(self, offer: Offer) -> None:
        if self.offer and self.offer.version <= offer.version:
            self.offer = None
