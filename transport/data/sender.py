"""The sending end of a data edge: credit, acknowledgement, redelivery, partitioning.

Consumes: record batches from `send`, acknowledgements and credit from receivers.
Produces: batches to one or several receivers, in order to each.
Waits for: nothing; `send` returns False when there is no credit. Only `close(linger_s)` waits.
Unblocked by: `Delivery.ack` at the receiver.
"""

import time
from collections.abc import Callable, Sequence

import pyarrow as pa
import zmq

from transport.data import frames
from transport.data.channel import Line, LineEvent, Network
from transport.data.credit import Credit, cost
from transport.data.messages import Ack, Data, Refusal, Welcome
from transport.data.outbox import Outbox
from transport.data.partition import Partition, choose, room_rows
from transport.data.sockets import SocketNetwork
from transport.errors import BatchTooLarge, PeerGone, Refused, TransportError, WaitTimeout


class _Link:
    """One receiver: the connection, the state, and since when it is away."""

    def __init__(self, line: Line, outbox: Outbox, now: float) -> None:
        self.line = line
        self.outbox = outbox
        self.away_since: float | None = now
        self.failures = 0
        self.greet = False


class Sender:
    """Sends record batches over one edge; not thread-safe, and it never blocks but in `close`."""

    def __init__(
        self,
        *,
        edge: str,
        sender_id: str,
        epoch: int,
        schema: pa.Schema,
        receivers: Sequence[str],
        partition: Partition = "balanced",
        network: Network | None = None,
        peer_timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect to `receivers` (addresses); they may appear later.

        `epoch` is larger after each restart of the sender. A receiver that is away for `peer_timeout_s`
        makes `poll` raise PeerGone. Raises AddressError for an address that others could listen at.
        """
        if not receivers:
            raise ValueError(f"edge '{edge}' has no receiver; got an empty list; give at least one address")
        if partition not in ("balanced", "keyed", "broadcast"):
            raise ValueError(
                f"edge '{edge}' has no such partition; got {partition!r}; use balanced, keyed or broadcast"
            )
        self.edge, self.sender_id, self.epoch, self.schema = edge, sender_id, epoch, schema
        self._partition, self._peer_timeout_s, self._clock = partition, peer_timeout_s, clock
        network = network or SocketNetwork()
        encoded = frames.encode_schema(schema)
        self._encoder = frames.Encoder(schema)
        self._links: list[_Link] = []
        for address in receivers:
            outbox = Outbox(edge=edge, sender=sender_id, epoch=epoch, schema=encoded)
            self._links.append(_Link(network.line(address), outbox, clock()))
        self._closed = self._hung_up = False
        self.refused = 0
        """Messages from receivers that were none."""

    @property
    def socket(self) -> "zmq.Socket[bytes] | None":
        """The socket to the first receiver; None within one process."""
        return next(iter(self.sockets), None)

    @property
    def sockets(self) -> "list[zmq.Socket[bytes]]":
        """All that a poller should watch for reading: `poll` when any of them is ready."""
        return [socket for link in self._links for socket in link.line.sockets]

    @property
    def unacknowledged(self) -> int:
        """Batches that were taken and are not acknowledged by everyone they went to."""
        return sum(link.outbox.unacknowledged for link in self._links)

    @property
    def drained(self) -> bool:
        """Whether everything is acknowledged and, after `finish`, every receiver knows the end."""
        return all(link.outbox.drained for link in self._links)

    def room(self) -> int:
        """Rows of the largest batch that would be taken now, whatever its key."""
        return room_rows(self._partition, [link.outbox.room() for link in self._links])

    def send(self, batch: pa.RecordBatch, key: int | None = None) -> bool:
        """Take a batch; False when there is no credit: then nothing was taken, and the caller keeps it.

        Raises SchemaMismatch, BatchTooLarge (it would never fit), ValueError without a key on a keyed edge.
        """
        if self._closed:
            raise TransportError(f"edge '{self.edge}' has ended; got one more batch; send before finish")
        frames.check_schema(batch.schema, self.schema, edge=self.edge)
        size_bytes = self._encoder.size_bytes(batch)
        need = cost(batch.num_rows, size_bytes)
        chosen = choose(self._partition, [link.outbox.room(need) for link in self._links], key)
        if not chosen:
            self._check_size(need)
            return False
        chosen_links = [self._links[index] for index in chosen]
        for link in chosen_links:
            self._check_fits(link, need)
        payload = chosen_links[0].line.pack(batch, self._encoder, size_bytes)
        for link in chosen_links:
            link.outbox.add(rows=batch.num_rows, cost=need, payload=payload)
            self._transmit(link)
        return True

    def poll(self) -> None:
        """Handle what came back: credit, acknowledgements, connections; send again what has to be.

        Raises PeerGone when a receiver was away for too long, Refused when one says no.
        """
        for link in self._links:
            while (event := link.line.get()) is not None:
                self._handle(link, event)
            if link.greet:
                self._greet(link)
            self._transmit(link)
        for link in self._links:
            self._check_presence(link)

    def finish(self) -> None:
        """Say that no batch will follow."""
        self._closed = True
        for link in self._links:
            link.outbox.end()
            if link.away_since is None:
                self._greet(link)

    def close(self, linger_s: float = 0.0) -> None:
        """Let go of the connections, after waiting up to `linger_s` until all is acknowledged.

        Raises WaitTimeout when that did not happen, PeerGone or Refused as `poll`. With 0 it neither waits
        nor complains, and what is unacknowledged is lost.
        """
        if self._hung_up:
            return
        self._closed = self._hung_up = True
        deadline = self._clock() + linger_s
        try:
            while linger_s > 0 and not self.drained:
                self.poll()
                left = deadline - self._clock()
                waiting = [link for link in self._links if not link.outbox.drained]
                if waiting and left <= 0:
                    raise WaitTimeout(self._waiting(waiting, linger_s))
                if waiting:
                    waiting[0].line.wait(min(left, 0.1))
        finally:
            for link in self._links:
                link.line.close()

    def _handle(self, link: _Link, event: object) -> None:
        match event:
            case LineEvent.UP:
                link.away_since, link.greet = None, True
            case LineEvent.LOST:
                link.outbox.lost()
                link.away_since = self._clock() if link.away_since is None else link.away_since
            case LineEvent.FAILED:
                link.failures += 1
            case LineEvent.REJECTED:
                raise Refused(
                    f"'{self.sender_id}' may not send on edge '{self.edge}'; {link.line.address} does not "
                    f"accept its key; give both sides the keys of this run"
                )
            case Welcome() if event.edge == self.edge:
                link.outbox.welcome(event)
                link.failures = 0
            case Ack() if event.edge == self.edge:
                link.greet = link.outbox.ack(event) or link.greet
            case Refusal() if event.edge == self.edge:
                raise Refused(event.reason)
            case _:
                self.refused += 1

    def _greet(self, link: _Link) -> None:
        link.greet = not link.line.put(link.outbox.hello())

    def _transmit(self, link: _Link) -> None:
        for parcel in link.outbox.due():
            header = Data(
                edge=self.edge,
                sender=self.sender_id,
                epoch=self.epoch,
                sequence=parcel.sequence,
                rows=parcel.rows,
                bytes=parcel.payload.size_bytes,
                checksum=parcel.payload.checksum,
            )
            if not link.line.put(header, parcel.payload.content):
                link.outbox.lost()
                link.greet = True
                return

    def _check_fits(self, link: _Link, need: Credit) -> None:
        limits = link.outbox.limits
        if limits is None:
            return
        most_bytes = min(limits.capacity_bytes, limits.max_message_bytes)
        if need.rows > limits.capacity_rows or need.bytes > most_bytes:
            raise BatchTooLarge(
                f"a batch on edge '{self.edge}' can never be sent; got {need.rows} rows and {need.bytes} "
                f"bytes, the receiver takes {limits.capacity_rows} and {most_bytes}; send less at once, or "
                f"raise capacity_rows, capacity_bytes and max_message_bytes of the receiver"
            )

    def _check_size(self, need: Credit) -> None:
        for link in self._links:
            self._check_fits(link, need)

    def _check_presence(self, link: _Link) -> None:
        if link.away_since is None or link.outbox.finished:
            return
        away_s = self._clock() - link.away_since
        if away_s > self._peer_timeout_s:
            failed = f" after {link.failures} failed handshakes (wrong keys?)" if link.failures else ""
            raise PeerGone(
                f"'{self.sender_id}' waited for the receiver of edge '{self.edge}'; {link.line.address} was "
                f"away for {away_s:.1f} s{failed}, {link.outbox.unacknowledged} batches are unacknowledged; "
                f"look into the log of its worker, or raise peer_timeout_s"
            )

    def _waiting(self, links: Sequence[_Link], linger_s: float) -> str:
        who = ", ".join(f"{link.line.address} ({link.outbox.unacknowledged} batches)" for link in links)
        return (
            f"'{self.sender_id}' closed edge '{self.edge}' before everything was acknowledged; waited "
            f"{linger_s:.1f} s for {who}; the receiver is stuck or gone: look into its log, or raise linger_s"
        )
