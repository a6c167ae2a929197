"""One sender towards one receiver: what is unacknowledged, what may leave now, what is sent again.

Pure: messages in, messages out; no socket, no clock.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transport.data.credit import NONE, Credit, may_send, room_rows
from transport.data.messages import Ack, Hello, Welcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """One batch, kept until it is acknowledged."""

    sequence: int
    """Its number towards this receiver."""
    rows: int
    """Its rows."""
    cost: Credit
    """The credit that it takes."""
    payload: Any
    """What the transport made of it."""


class Outbox:
    """The state of one sender towards one receiver."""

    def __init__(self, *, edge: str, sender: str, epoch: int, schema: bytes) -> None:
        self._edge, self._sender, self._epoch, self._schema = edge, sender, epoch, schema
        self._parcels: dict[int, Parcel] = {}
        self._unsent: deque[int] = deque()
        self._next = 0
        self._used = NONE
        self._window = NONE
        self._live = False
        self._ended = False
        self._receiver_epoch: int | None = None
        self.limits: Welcome | None = None
        """What the receiver last said of itself; None before the first Welcome."""
        self.end_confirmed = False
        """Whether the receiver knows where the stream ends."""

    @property
    def unacknowledged(self) -> int:
        """Batches taken and not acknowledged."""
        return len(self._parcels)

    @property
    def drained(self) -> bool:
        """Whether all is acknowledged, and the receiver knows of the end if there was one."""
        return not self._parcels and (self.end_confirmed or not self._ended)

    @property
    def finished(self) -> bool:
        """Whether this sender ended, and needs the receiver no more."""
        return self._ended and self.drained

    def room(self, cost: Credit | None = None) -> int:
        """Rows that may leave now; with `cost`, 0 unless a batch of that cost may leave now."""
        if self._unsent or (cost is not None and not may_send(cost, self._used, self._window)):
            return 0
        rows = room_rows(self._used, self._window)
        return max(1, rows) if cost is not None else rows

    def add(self, *, rows: int, cost: Credit, payload: Any) -> None:
        """Take a batch that `room(cost)` allowed; it leaves with the next `due`."""
        parcel = Parcel(sequence=self._next, rows=rows, cost=cost, payload=payload)
        self._parcels[parcel.sequence] = parcel
        self._unsent.append(parcel.sequence)
        self._next += 1

    def end(self) -> None:
        """No batch will follow."""
        self._ended = True

    def due(self) -> Iterator[Parcel]:
        """The batches that may leave now, in order; each counts as sent when it is yielded."""
        while self._unsent:
            parcel = self._parcels[self._unsent[0]]
            if not may_send(parcel.cost, self._used, self._window):
                return
            self._unsent.popleft()
            self._used += parcel.cost
            yield parcel

    def hello(self) -> Hello:
        """Where this sender stands."""
        base = next(iter(self._parcels), self._next)
        return Hello(
            edge=self._edge,
            sender=self._sender,
            epoch=self._epoch,
            schema=self._schema,
            base=base,
            next=self._next,
            gone=tuple(number for number in range(base, self._next) if number not in self._parcels),
            window_rows=self._window.rows,
            window_bytes=self._window.bytes,
            ended=self._ended,
        )

    def lost(self) -> None:
        """The connection broke: nothing leaves before the next Welcome."""
        self._window, self._live = NONE, False

    def welcome(self, message: Welcome) -> None:
        """Go by what the receiver has: forget what it acknowledged, send the rest again."""
        if message.epoch != self._receiver_epoch:
            self._receiver_epoch = message.epoch
            kept: set[int] = set()
        else:
            kept = {n for n in message.held if n < message.expected and n in self._parcels}
            for number in [n for n in self._parcels if n < message.expected and n not in kept]:
                del self._parcels[number]
        self._unsent = deque(number for number in self._parcels if number not in kept)
        self._used = sum((self._parcels[number].cost for number in kept), NONE)
        self._window, self._live = Credit(rows=message.window_rows, bytes=message.window_bytes), True
        self.limits = message
        self.end_confirmed = self._ended and message.ended

    def ack(self, message: Ack) -> bool:
        """Forget what is acknowledged; True when the window shrank, and a Hello has to confirm it."""
        if message.epoch != self._receiver_epoch:
            return False
        for number in message.sequences:
            parcel = self._parcels.pop(number, None)
            if parcel is None:
                continue
            if number in self._unsent:
                self._unsent.remove(number)
            else:
                self._used -= parcel.cost
        if not self._live:
            return False
        before, self._window = self._window, Credit(rows=message.window_rows, bytes=message.window_bytes)
        return not before.within(self._window)
