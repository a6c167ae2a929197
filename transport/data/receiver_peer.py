"""One receiver as a sender sees it: the connection, what is owed over it, and since when the
receiver is away."""

from typing import Any

from transport.data.channel import Connection, ConnectionEvent
from transport.data.counts import EdgeCounts
from transport.data.credit import Credit, check_fits
from transport.data.messages import Ack, Data, Refusal, Welcome
from transport.data.outbox import Outbox
from transport.errors import SenderRefused


class ReceiverPeer:
    """One receiver, as one sender sees it; never blocks."""

    def __init__(
        self,
        connection: Connection,
        outbox: Outbox,
        *,
        edge: str,
        sender: str,
        now: float,
        sent: EdgeCounts,
    ) -> None:
        """sent: counts what goes out."""
        self.connection = connection
        self._sent = sent
        self.outbox = outbox
        self._edge, self._sender = edge, sender
        self.away_since: float | None = now
        """Since when the receiver cannot be spoken to; None while it can."""
        self.failures = 0
        """Handshakes that failed since the last Welcome."""
        self.retiring = False
        """Whether nothing new goes over it."""
        self._greet = False

    @property
    def address(self) -> str:
        """Where the receiver is."""
        return self.connection.address

    def move(self, connection: Connection, now: float) -> None:
        """The receiver was started again, and is at the other end of this connection: it is owed
        what it was."""
        self.connection.close()
        self.connection, self.failures, self._greet = connection, 0, False
        self.outbox.lost()
        self.away_since = now if self.away_since is None else self.away_since

    def poll(self, now: float) -> int:
        """Handle what came back, and send what is due; how many messages were none. Raises
        SenderRefused."""
        strange = 0
        while (event := self.connection.get()) is not None:
            strange += not self._handle(event, now)
        if self._greet:
            self.greet()
        self.transmit()
        return strange

    def greet(self) -> None:
        """Say where this sender stands, now or as soon as the receiver can be spoken to."""
        self._greet = self.away_since is not None or not self.connection.put(self.outbox.hello())

    def transmit(self) -> None:
        """Send what may leave."""
        for outgoing in self.outbox.due():
            if not all(
                self._put(header, outgoing.payload.content)
                for header in self.outbox.headers(outgoing)
            ):
                self.outbox.lost()
                self._greet = True
                return

    def _put(self, header: Data, content: Any) -> bool:
        """Send a part, counted before it leaves: so no end has more of it than this one has
        sent."""
        self._sent.add(not header.left, 0 if header.left else header.rows, header.part_bytes)
        return self.connection.put(header, content)

    def end(self) -> None:
        """Say that no batch will follow."""
        self.outbox.end()
        self.greet()

    def reopen(self) -> None:
        """Say that batches will follow after all, once the receiver confirmed that it knew of the
        end."""
        if self.outbox.reopen():
            self.greet()

    def check_fits(self, need: Credit) -> None:
        """Raises BatchTooLarge for what the receiver will never take."""
        limits = self.outbox.limits
        if limits is not None:
            capacity = Credit(rows=limits.capacity_rows, bytes=limits.capacity_bytes)
            check_fits(need, capacity, edge=self._edge)

    def _handle(self, event: object, now: float) -> bool:
        match event:
            case ConnectionEvent.UP:
                self.outbox.lost()
                self.away_since, self._greet = None, True
            case ConnectionEvent.LOST:
                self.outbox.lost()
                self.away_since = now if self.away_since is None else self.away_since
            case ConnectionEvent.FAILED:
                self.failures += 1
            case ConnectionEvent.REJECTED:
                raise SenderRefused(
                    f"'{self._sender}' may not send on edge '{self._edge}'; {self.address} does not"
                    " accept its key; give both sides the keys of this run"
                )
            case Welcome() if event.edge == self._edge:
                self._greet = self.outbox.welcome(event) or self._greet
                self.failures = 0
            case Ack() if event.edge == self._edge:
                self._greet = self.outbox.ack(event) or self._greet
            case Refusal() if event.edge == self._edge:
                raise SenderRefused(event.reason)
            case _:
                return False
        return True
