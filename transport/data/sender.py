"""The sending end of a data edge: credit, acknowledgement, redelivery, and the receivers that share
what is sent.

Consumes: record batches from `send`, acknowledgements and credit from receivers.
Produces: batches to one or several receivers, in order to each.
Waits for: nothing; `send` returns False when there is no credit. Only `close(linger_s)` waits.
Unblocked by: `Delivery.ack` at the receiver.

Over 600 lines: rows to any receiver and answers to the one that asked go out by the same rules.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import zmq

from transport.data import messages
from transport.data.counts import EdgeCounts, EndCounts
from transport.data.credit import Credit, check_fits, cost, next_receiver
from transport.data.messages import Ack, Data, Welcome
from transport.data.outbox import Outbox, OutgoingBatch
from transport.data.sockets import Connection, ConnectionEvent, Network, SocketNetwork
from transport.errors import PeerGone, SenderRefused, TransportError, WaitTimeout
from transport.life import Life, Refused

# One receiver as a sender sees it: the connection, what is owed over it, and since when the
# receiver is away.


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
        what it was.
        """
        self.connection.close()
        self.connection, self.failures, self._greet = connection, 0, False
        self.outbox.lost()
        self.away_since = now if self.away_since is None else self.away_since

    def poll(self, now: float) -> int:
        """Handle what came back, and send what is due; how many messages were none. Raises
        SenderRefused.
        """
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
        sent.
        """
        self._sent.add(not header.left, 0 if header.left else header.rows, header.part_bytes)
        return self.connection.put(header, content)

    def end(self) -> None:
        """Say that no batch will follow."""
        self.outbox.end()
        self.greet()

    def reopen(self) -> None:
        """Say that batches will follow after all, once the receiver confirmed that it knew of the
        end.
        """
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
            case Refused():
                raise SenderRefused(event.error)
            case _:
                return False
        return True


# The receivers of one edge as their sender has them: they come and go, and what one leaves behind
# goes to others.


class ReceiverSet:
    """Who takes the batches of one sender: joined, retired, forgotten and moved by its owner, or
    given up as away for too long.
    """

    def __init__(
        self,
        *,
        edge: str,
        sender_id: str,
        life: Life,
        schema: pa.Schema,
        receivers: Sequence[str],
        network: Network | None,
        peer_timeout_s: float,
        clock: Callable[[], float],
        most_rows: int | None,
        slack_rows: int,
        counts: EndCounts | None,
    ) -> None:
        if not receivers:
            raise ValueError(
                f"edge '{edge}' has no receiver; got an empty list; give at least one address"
            )
        self.edge, self.sender_id, self.life, self.schema = edge, sender_id, life, schema
        self._peer_timeout_s, self._clock, self._most_rows = peer_timeout_s, clock, most_rows
        self._slack_rows, self._last = slack_rows, -1
        self._network = network or SocketNetwork()
        self.counts = counts or EndCounts()
        """What has crossed the edge, and was let go."""
        self._encoded = messages.encode_schema(schema)
        self._peers: list[ReceiverPeer] = []
        self._stopped_at: dict[str, int] = {}
        """By address, the number of the next batch for a receiver that left."""
        self._returned: deque[OutgoingBatch] = deque()
        """Batches of receivers that left, which wait for credit of another."""
        for address in receivers:
            self._connect(address)

    @property
    def sockets(self) -> "list[zmq.Socket[bytes]]":
        """All that a poller should watch for reading: `poll` when any of them is ready."""
        return [socket for peer in self._peers for socket in peer.connection.sockets]

    @property
    def receivers(self) -> list[str]:
        """Addresses of the receivers, including retiring ones that are not through."""
        return [peer.address for peer in self._peers]

    def add_receiver(self, address: str) -> None:
        """From now on batches go to `address` too, as soon as it appears and gives credit; read
        `sockets` again.

        After `finish` it is told the end with the next `poll`, so that `forget_receiver` before
        that can still give it the batches of another. A receiver that left may come back, restarted
        or not. Raises ValueError for an address that it has; AddressError.
        """
        existing = next((peer for peer in self._peers if peer.address == address), None)
        if existing is not None:
            state = "one that retires and is not through; wait until it is gone from `receivers`"
            raise ValueError(
                f"edge '{self.edge}' has the receiver {address} already; got it again; it is "
                f"{state if existing.retiring else 'in use: add each once'}"
            )
        self._connect(address)

    def retire_receiver(self, address: str) -> None:
        """Nothing new goes to `address`; it is told the end of this stream, and leaves when it owes
        nothing.

        What it was sent is still its own, comes again if it restarts, and is acknowledged as usual.
        What never left goes to the others. Once all is acknowledged and it knows the end, `poll`
        closes the peer; read `sockets` again. If it stays away for `peer_timeout_s` before that, it
        is forgotten like one that `forget_receiver` names. Raises ValueError for an unknown
        address, one that retires already, and the last receiver.
        """
        peer = self._find(address)
        if peer.retiring:
            raise ValueError(
                f"edge '{self.edge}' lets the receiver {address} go already; got it again; wait, or"
                " forget_receiver"
            )
        self._check_not_last(peer)
        peer.retiring = True
        self._returned.extend(peer.outbox.take_back(sent=False))
        peer.end()

    def forget_receiver(self, address: str) -> None:
        """`address` is known to be dead: everything that it did not acknowledge goes to the others,
        oldest first.

        That waits for their credit, and goes before new batches: until it is placed, `room` is 0
        and `send` False. After `finish` the streams of the others begin again for it: a receiver
        that was `finished` is not any more. To replace a receiver, add the new one first. One that
        comes back at the same address is welcome (`add_receiver`), even if it was not dead; then it
        may deliver what others deliver too. Raises ValueError for an unknown address, and the last
        receiver.
        """
        peer = self._find(address)
        self._check_not_last(peer)
        self._forget(peer)
        self._place_returned()

    def move_receiver(self, before: str, now: str) -> None:
        """The receiver at `before` was started again and listens at `now`: what it has not
        acknowledged goes there.

        Read `sockets` again. Raises ValueError for an unknown address, and for one that another
        receiver has.
        """
        peer = self._find(before)
        if now in self.receivers:
            raise ValueError(
                f"edge '{self.edge}' has a receiver at {now}; got it for the one at {before}, too;"
                " each has its own"
            )
        peer.move(self._network.connect(now), self._clock())

    def _connect(self, address: str) -> None:
        outbox = Outbox(
            edge=self.edge,
            sender=self.sender_id,
            life=self.life,
            schema=self._encoded,
            first=self._stopped_at.get(address, 0),
        )
        connection = self._network.connect(address)
        self._peers.append(
            ReceiverPeer(
                connection,
                outbox,
                edge=self.edge,
                sender=self.sender_id,
                now=self._clock(),
                sent=self.counts.sent,
            )
        )

    def _staying(self) -> list[ReceiverPeer]:
        return [peer for peer in self._peers if not peer.retiring]

    def _choose(self, need: Credit) -> ReceiverPeer | None:
        """Whom a batch goes to now, by credit and in turn; None while there is none. Raises
        BatchTooLarge.
        """
        peers = self._staying()
        if (
            self._most_rows is not None
            and (under_way := self._rows())
            and under_way + need.rows > self._most_rows
        ):
            return None
        chosen = next_receiver(
            [peer.outbox.room(need) for peer in peers], last=self._last, slack=self._slack_rows
        )
        if chosen is None:
            for peer in peers:
                peer.check_fits(need)
            return None
        peers[chosen].check_fits(need)
        self._last = chosen
        return peers[chosen]

    def _rows(self) -> int:
        """Rows that receivers have and did not acknowledge, alone or with their batch."""
        return sum(peer.outbox.rows for peer in self._peers)

    def _place_returned(self) -> None:
        while self._returned and (peer := self._choose(self._returned[0].cost)):
            peer.outbox.add(self._returned.popleft())
            peer.transmit()

    def _let_retired_go(self, now: float) -> None:
        """Those who retire and owe nothing, or stay away."""
        for peer in [peer for peer in self._peers if peer.retiring]:
            if peer.outbox.finished:
                self._part(peer)
            elif self._away_s(peer, now) > self._peer_timeout_s:
                self._forget(peer)

    def _forget(self, peer: ReceiverPeer) -> None:
        self._returned.extend(peer.outbox.take_back(sent=True))
        self._part(peer)

    def _part(self, peer: ReceiverPeer) -> None:
        self._stopped_at[peer.address] = peer.outbox.next
        self._peers.remove(peer)
        peer.connection.close()

    def _find(self, address: str) -> ReceiverPeer:
        for peer in self._peers:
            if peer.address == address:
                return peer
        raise ValueError(
            f"edge '{self.edge}' has no receiver {address}; it has {', '.join(self.receivers)};"
            " name one of those"
        )

    def _check_not_last(self, peer: ReceiverPeer) -> None:
        if self._staying() == [peer]:
            raise ValueError(
                f"nobody would take the batches of edge '{self.edge}'; {peer.address} is its last"
                " receiver; add_receiver another one first, or finish"
            )

    def _away_s(self, peer: ReceiverPeer, now: float) -> float:
        return 0.0 if peer.away_since is None else now - peer.away_since

    def _check_presence(self, peer: ReceiverPeer, now: float) -> None:
        away_s = self._away_s(peer, now)
        if away_s > self._peer_timeout_s and not peer.outbox.finished:
            failed = (
                f" after {peer.failures} failed handshakes (wrong keys?)" if peer.failures else ""
            )
            raise PeerGone(
                f"'{self.sender_id}' waited for the receiver of edge '{self.edge}'; {peer.address}"
                f" was away for {away_s:.1f} s{failed}, {peer.outbox.unacknowledged} batches are"
                " unacknowledged; look into the log of its worker, or raise peer_timeout_s"
            )


class Sender(ReceiverSet):
    """Sends record batches over one edge, to receivers that come and go; not thread-safe, and it
    never blocks but in `close`. A batch goes to the receiver with the most credit, or in turn where
    these differ by `slack_rows` at most.

    The law: a batch that was taken is at any time with one receiver that has not acknowledged it,
    or waits here for credit of another; it is let go only when it was acknowledged. So none is ever
    lost. It is acknowledged once, but for two cases, in which consumers may see it twice and tell
    by what is in it: its receiver restarted, or was forgotten, after delivering it and before the
    acknowledgement came.
    """

    def __init__(
        self,
        *,
        edge: str,
        sender_id: str,
        life: Life,
        schema: pa.Schema,
        receivers: Sequence[str],
        network: Network | None = None,
        peer_timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        most_rows: int | None = None,
        slack_rows: int = 0,
        counts: EndCounts | None = None,
    ) -> None:
        """Connect to `receivers` (addresses); they may appear later.

        `most_rows` may be unacknowledged with all receivers together, whatever credit they give: so
        one of them that has room for as many can take what others had. A larger batch travels
        alone. `life` is larger after each restart of the sender. A receiver that is away for
        `peer_timeout_s` makes `poll` raise PeerGone. Raises AddressError for an address that others
        could listen at. `counts`: go on from those of an earlier attempt; None: from nothing.
        """
        super().__init__(
            edge=edge,
            sender_id=sender_id,
            life=life,
            schema=schema,
            receivers=receivers,
            network=network,
            peer_timeout_s=peer_timeout_s,
            clock=clock,
            most_rows=most_rows,
            slack_rows=slack_rows,
            counts=counts,
        )
        self._encoder = messages.BatchEncoder(schema)
        self._ending = False
        self._closed = self._hung_up = False
        self.refused = 0
        """Messages from receivers that were none."""

    @property
    def socket(self) -> "zmq.Socket[bytes] | None":
        """The socket to the first receiver; None within one process."""
        return next(iter(self.sockets), None)

    @property
    def unacknowledged(self) -> int:
        """Batches that were taken and are not acknowledged by everyone they went to."""
        return len(self._returned) + sum(peer.outbox.unacknowledged for peer in self._peers)

    @property
    def drained(self) -> bool:
        """Whether everything is acknowledged and, after `finish`, every receiver knows the end."""
        return not self._returned and all(peer.outbox.drained for peer in self._peers)

    def room(self) -> int:
        """Rows of the largest batch that would be taken now."""
        if self._returned:
            return 0
        room = max(peer.outbox.room() for peer in self._staying())
        return (
            room if self._most_rows is None else max(0, min(room, self._most_rows - self._rows()))
        )

    def grow(self, most_rows: int | None) -> None:
        """So many rows may be unacknowledged from now on, where that is more."""
        if self._most_rows is not None and most_rows is not None:
            self._most_rows = max(self._most_rows, most_rows)

    def send(
        self, batch: pa.RecordBatch, acked: Callable[[Iterable[int]], None] = lambda rows: None
    ) -> bool:
        """Take a batch; False when there is no credit: then nothing was taken, and the caller keeps
        it.

        acked: called by `poll` with rows by their number, once the receiver has acknowledged them,
        alone or with the rest: with each row once. It must not call this sender.
        Raises SchemaMismatch, BatchTooLarge (it would never fit).
        """
        if self._closed:
            raise TransportError(
                f"edge '{self.edge}' has ended; got one more batch; send before finish"
            )
        messages.check_schema(batch.schema, self.schema, edge=self.edge)
        size_bytes = self._encoder.size_bytes(batch)
        need = cost(batch.num_rows, size_bytes)
        self._place_returned()
        peer = None if self._returned else self._choose(need)
        if peer is None:
            return False
        payload = peer.connection.pack(batch, self._encoder, size_bytes)
        counts = self.counts.acknowledged
        peer.outbox.add(
            OutgoingBatch(
                rows=batch.num_rows, cost=need, payload=payload, acked=acked, counts=counts
            )
        )
        peer.transmit()
        return True

    def poll(self) -> None:
        """Handle what came back: credit, acknowledgements, connections; send again what has to be.

        Raises PeerGone when a receiver was away for too long, Refused when one says no,
        BatchTooLarge when what a receiver left behind fits none of the others.
        """
        now = self._clock()
        for peer in self._peers:
            self.refused += peer.poll(now)
        self._let_retired_go(now)
        self._place_returned()
        if self._ending:
            self._say_end()
        for peer in self._staying():
            self._check_presence(peer, now)

    def finish(self) -> None:
        """Say that no batch will follow."""
        self._closed = self._ending = True
        self._say_end()

    def close(self, linger_s: float = 0.0) -> None:
        """Let go of the connections, after waiting up to `linger_s` until all is acknowledged.

        Raises WaitTimeout when that did not happen, PeerGone or Refused as `poll`. With 0 it
        neither waits nor complains, and what is unacknowledged is lost.
        """
        if self._hung_up:
            return
        self._closed = self._hung_up = True
        deadline = self._clock() + linger_s
        try:
            while linger_s > 0 and not self.drained:
                self.poll()
                remaining_s = deadline - self._clock()
                if self.drained:
                    break
                waiting = [peer for peer in self._peers if not peer.outbox.drained] or self._peers
                if remaining_s <= 0:
                    raise WaitTimeout(self._waiting(waiting, linger_s))
                waiting[0].connection.wait(min(remaining_s, 0.1))
        finally:
            for peer in self._peers:
                peer.connection.close()

    def _say_end(self) -> None:
        """Tell the end to all who do not know it; while batches wait for another receiver, that it
        was none.

        A receiver that had all and went away is not called back as long as another is there.
        """
        peers = self._staying()
        if self._returned:
            for peer in [peer for peer in peers if peer.away_since is None] or peers:
                peer.reopen()
            return
        for peer in peers:
            if not peer.outbox.ended:
                peer.end()

    def _waiting(self, peers: Sequence[ReceiverPeer], linger_s: float) -> str:
        receivers = ", ".join(
            f"{peer.address} ({peer.outbox.unacknowledged} batches)" for peer in peers
        )
        homeless = (
            f" and {len(self._returned)} batches without a receiver" if self._returned else ""
        )
        return (
            f"'{self.sender_id}' closed edge '{self.edge}' before everything was acknowledged;"
            f" waited {linger_s:.1f} s for {receivers}{homeless}; the receiver is stuck or gone:"
            " look"
            " into its log, or raise linger_s"
        )


# The sending end of an edge of answers whose receivers are several replicas: each gets what it has
# asked for.


Acked = Callable[[Iterable[int]], None]


@dataclass(slots=True)
class _Answer:
    row: pa.RecordBatch
    acked: Callable[[], None]
    owed: int = 0
    """Replicas that it was sent to and that have not acknowledged it."""


class AnswerSender:
    """A sender to each replica of those who ask: all are there from the start, and none joins or
    leaves.

    Consumes: answers, in any number: there are never more than requests, which have credit.
    Produces: each to whoever asked, in order; a replica that is away holds up its own alone.
    Waits for: nothing.
    Unblocked by: grants and acknowledgements of each, noticed at `poll`.
    """

    def __init__(
        self,
        senders: Sequence[Sender],
        key: str,
        askers: Callable[[Sequence[int]], Sequence[Collection[int]]],
    ) -> None:
        """senders: to one replica each, in their order. key: the column of requests' numbers.
        askers: of requests, the numbers of the replicas that asked.
        """
        self._senders, self._key, self._askers = list(senders), key, askers
        self._waiting: list[deque[tuple[pa.RecordBatch, Acked]]] = [deque() for _ in senders]
        self._answers: dict[int, _Answer] = {}
        """By request, those that some replica has not acknowledged."""
        self._is_ending = False

    @property
    def sockets(self) -> list[Any]:
        """All that a poller should watch for reading."""
        return [socket for sender in self._senders for socket in sender.sockets]

    @property
    def receivers(self) -> list[str]:
        """Addresses of the replicas, in their order."""
        return [address for sender in self._senders for address in sender.receivers]

    @property
    def drained(self) -> bool:
        """Whether everything is acknowledged and, after `finish`, every replica knows the end."""
        return not any(self._waiting) and all(sender.drained for sender in self._senders)

    def grow(self, most_rows: int | None) -> None:
        """Nothing: requests are the bound."""

    def send(self, batch: pa.RecordBatch, acked: Acked) -> bool:
        """Take answers; always True. acked: as of `Sender.send`; a row that several receivers asked
        for counts once all have it. A row without a known asker goes to all.
        """
        rows_of: dict[int, list[int]] = {}
        numbers = batch.column(self._key).to_pylist()
        for row, (number, askers) in enumerate(zip(numbers, self._askers(numbers), strict=True)):
            self._answers[number] = _Answer(batch.slice(row, 1), partial(acked, [row]))
            for replica in askers or range(len(self._senders)):
                rows_of.setdefault(replica, []).append(row)
        for replica, rows in rows_of.items():
            part = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
            self._queue(replica, part, [numbers[row] for row in rows])
        self._flush()
        return True

    def send_again(self, number: int, replica: int) -> None:
        """A replica has asked what is on its way already, to another or to an earlier life of
        itself: the answer goes to it as well. One that has not been sent finds it among the askers.
        """
        if number in self._answers:
            self._queue(replica, self._answers[number].row, [number])
            self._flush()

    def _queue(self, replica: int, part: pa.RecordBatch, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._answers[number].owed += 1
        self._waiting[replica].append((part, partial(self._hear, numbers)))

    def _hear(self, numbers: Sequence[int], rows: Iterable[int]) -> None:
        for number in (numbers[row] for row in rows):
            self._answers[number].owed -= 1
            if not self._answers[number].owed:
                self._answers.pop(number).acked()

    def poll(self) -> None:
        """Take in grants and acknowledgements, and send what has credit now. Raises as
        `Sender.poll`.
        """
        for sender in self._senders:
            sender.poll()
        self._flush()

    def finish(self) -> None:
        """Say that nothing more will come, behind what waits."""
        self._is_ending = True
        self._flush()

    def add_receiver(self, address: str) -> None:
        """Nothing: all receivers are known from the start, and moves are announced as such."""

    def move_receiver(self, before: str, now: str) -> None:
        next(sender for sender in self._senders if before in sender.receivers).move_receiver(
            before, now
        )

    def close(self, linger_s: float = 0.0) -> None:
        """Let go of the connections; what is unacknowledged is lost."""
        for sender in self._senders:
            sender.close(linger_s)

    def _flush(self) -> None:
        for sender, waiting in zip(self._senders, self._waiting, strict=True):
            while waiting and sender.send(*waiting[0]):
                waiting.popleft()
            if self._is_ending and not waiting:
                sender.finish()
