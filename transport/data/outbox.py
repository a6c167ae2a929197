"""One sender towards one receiver: what is unacknowledged, what may leave now, what is sent again.

Pure: messages in, messages out; no socket, no clock.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from transport.data.counts import EdgeCounts
from transport.data.credit import NONE, Credit, may_send, room_rows
from transport.data.messages import Ack, Data, Hello, Welcome
from transport.life import Life

_NUMBERS = itertools.count(1)
"""Of the Hellos of this process: they rise whatever peers come and go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutgoingBatch:
    """One batch, kept until it is acknowledged."""

    sequence: int = 0
    """Its number towards this receiver, which it gets with `Outbox.add`."""
    rows: int
    """Its rows."""
    cost: Credit
    """The credit that it takes."""
    payload: Any
    """What the transport made of it."""
    acked: Callable[[Iterable[int]], None] = field(default=lambda rows: None, compare=False)
    """Called with rows by their number, once the receiver has acknowledged them: with each row
    once."""
    early: set[int] = field(default_factory=set, compare=False)
    """Rows that it has acknowledged before the rest."""

    counts: EdgeCounts = field(default_factory=EdgeCounts, compare=False)
    """Of what is acknowledged."""

    def acknowledged(self) -> None:
        """The receiver is done with the rest."""
        self.counts.add(1, self.rows, self.cost.bytes)
        self.acked([row for row in range(self.rows) if row not in self.early])


class Outbox:
    """The state of one sender towards one receiver."""

    def __init__(
        self, *, edge: str, sender: str, life: Life, schema: bytes, first: int = 0
    ) -> None:
        """`first` is the number of the first batch: for a receiver that left and comes back, where
        it left.
        """
        self._edge, self._sender, self._life, self._schema = edge, sender, life, schema
        self._outgoing: dict[int, OutgoingBatch] = {}
        self._unsent: deque[int] = deque()
        self._next = self._reached = first
        self._used = NONE
        self._window, self._window_number = NONE, 0
        self._live = False
        self._lost_at = 0
        self._ended = False
        self._receiver_life: Life | None = None
        self.limits: Welcome | None = None
        """What the receiver last said of itself; None before the first Welcome."""
        self.end_confirmed = False
        """Whether the receiver knows where the stream ends."""

    @property
    def unacknowledged(self) -> int:
        """Batches taken and not acknowledged."""
        return len(self._outgoing)

    @property
    def rows(self) -> int:
        """Rows of these that are not acknowledged."""
        return sum(outgoing.rows - len(outgoing.early) for outgoing in self._outgoing.values())

    @property
    def drained(self) -> bool:
        """Whether all is acknowledged, and the receiver knows of the end if there was one."""
        return not self._outgoing and (self.end_confirmed or not self._ended)

    @property
    def ended(self) -> bool:
        """Whether no batch will follow."""
        return self._ended

    @property
    def finished(self) -> bool:
        """Whether this sender has ended and no longer needs the receiver."""
        return self._ended and self.drained

    @property
    def next(self) -> int:
        """The number that the next batch will have; none is ever used twice."""
        return self._next

    def room(self, cost: Credit | None = None) -> int:
        """Rows that may leave now; with `cost`, 0 unless a batch of that cost may leave now."""
        if (
            self._unsent
            or self._ended
            or (cost is not None and not may_send(cost, self._used, self._window))
        ):
            return 0
        rows = room_rows(self._used, self._window)
        return max(1, rows) if cost is not None else rows

    def add(self, outgoing: OutgoingBatch) -> None:
        """Take a batch that `room(cost)` allowed, even one of another receiver; it leaves with the
        next `due`.
        """
        outgoing = dataclasses.replace(outgoing, sequence=self._next)
        self._outgoing[outgoing.sequence] = outgoing
        self._unsent.append(outgoing.sequence)
        self._next += 1

    def end(self) -> None:
        """No batch will follow."""
        self._ended = True

    def reopen(self) -> bool:
        """Batches will follow after all, once a Hello is answered; False: not before the end is
        confirmed.

        By then every earlier Welcome has come, so that none of them can be taken for the answer.
        """
        if not self.end_confirmed:
            return False
        self._ended = self.end_confirmed = False
        self.lost()
        return True

    def take_back(self, *, sent: bool) -> list[OutgoingBatch]:
        """Batches that shall not go to this receiver after all, in order: those that never left for
        its present life, or with `sent` all that it did not acknowledge. The next Hello says
        so.
        """
        numbers = {number: None for number in self._outgoing if sent or number >= self._reached}
        self._unsent = deque(number for number in self._unsent if number not in numbers)
        return [self._outgoing.pop(number) for number in numbers]

    def due(self) -> Iterator[OutgoingBatch]:
        """The batches that may leave now, in order; each counts as sent when it is yielded."""
        while self._unsent:
            outgoing = self._outgoing[self._unsent[0]]
            if not may_send(outgoing.cost, self._used, self._window):
                return
            self._unsent.popleft()
            self._used += outgoing.cost
            yield outgoing
            self._reached = max(self._reached, outgoing.sequence + 1)  # whoever asks on has sent it

    def headers(self, outgoing: OutgoingBatch) -> Iterator[Data]:
        """What goes before a batch, or before each of the parts that the receiver takes it in."""
        assert self.limits is not None, "only what a Welcome gave credit for is due"
        size, most = outgoing.payload.size_bytes, self.limits.max_message_bytes
        for offset in range(0, size, most):
            yield Data(
                edge=self._edge,
                sender=self._sender,
                life=self._life,
                sequence=outgoing.sequence,
                rows=outgoing.rows,
                bytes=size,
                checksum=outgoing.payload.checksum,
                offset=offset,
                left=max(0, size - offset - most),
            )

    def hello(self) -> Hello:
        """Where this sender stands."""
        base = next(iter(self._outgoing), self._next)
        return Hello(
            edge=self._edge,
            sender=self._sender,
            life=self._life,
            schema=self._schema,
            base=base,
            next=self._next,
            gone=tuple(
                number for number in range(base, self._next) if number not in self._outgoing
            ),
            window_rows=self._window.rows,
            window_bytes=self._window.bytes,
            window_number=self._window_number,
            ended=self._ended,
            number=next(_NUMBERS),
        )

    def lost(self) -> None:
        """The connection broke: nothing leaves before the next Welcome."""
        self._window, self._window_number, self._live = NONE, 0, False
        self._lost_at = next(_NUMBERS)

    def welcome(self, message: Welcome) -> bool:
        """Go by what the receiver has: forget what it acknowledged, send the rest again.

        True when the window shrank, and a Hello has to confirm it. One that knows an end where
        there is none any more was said before the stream began again: it counts for nothing. Nor
        does one that was read late, from a connection that broke: the last Hello promised what the
        receiver would miss then; nor one of an earlier life of the receiver.
        """
        is_earlier = message.life < (self._receiver_life or message.life)
        if is_earlier or message.answers < self._lost_at or (message.ended and not self._ended):
            return False
        if message.life != self._receiver_life:
            self._receiver_life, self._reached = message.life, 0
            arrived: set[int] = set()
        else:
            arrived = {n for n in message.held if n < message.expected and n in self._outgoing}
            for number in [n for n in self._outgoing if n < message.expected and n not in arrived]:
                self._outgoing.pop(number).acknowledged()
        self._unsent = deque(number for number in self._outgoing if number not in arrived)
        self._used = sum((self._outgoing[number].cost for number in arrived), NONE)
        self._live, self.limits = True, message
        self._hear_early(message.early)
        self.end_confirmed = self._ended and message.ended
        return self._go_by(message)

    def ack(self, message: Ack) -> bool:
        """Forget what is acknowledged; True when the window shrank, and a Hello has to confirm
        it.
        """
        if message.life != self._receiver_life or not self._live:
            return False
        for number in message.sequences:
            outgoing = self._outgoing.pop(number, None)
            if outgoing is None:
                continue
            if number in self._unsent:
                self._unsent.remove(number)
            else:
                self._used -= outgoing.cost
            outgoing.acknowledged()
        self._hear_early(message.early)
        return self._live and self._go_by(message)

    def _hear_early(self, early: tuple[int, ...]) -> None:
        for number, first, count in zip(early[::3], early[1::3], early[2::3], strict=False):
            outgoing, rows = self._outgoing.get(number), range(first, first + count)
            if (
                outgoing is not None
                and first + count <= outgoing.rows
                and outgoing.early.isdisjoint(rows)
            ):
                outgoing.early.update(rows)
                outgoing.acked(rows)

    def _go_by(self, message: Welcome | Ack) -> bool:
        before, self._window = (
            self._window,
            Credit(rows=message.window_rows, bytes=message.window_bytes),
        )
        self._window_number = message.window_number
        return not before.within(self._window) and not self.finished
