"""The sending end of a data edge: credit, acknowledgement, redelivery, and the receivers that share what is sent.

Consumes: record batches from `send`, acknowledgements and credit from receivers.
Produces: batches to one or several receivers, in order to each.
Waits for: nothing; `send` returns False when there is no credit. Only `close(linger_s)` waits.
Unblocked by: `Delivery.ack` at the receiver.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa
import zmq

from transport.data import frames
from transport.data.channel import Network
from transport.data.counts import EndCounts
from transport.data.credit import Credit, cost, roomiest
from transport.data.outbox import Outbox, OutgoingBatch
from transport.data.receiver_peer import ReceiverPeer
from transport.data.sockets import SocketNetwork
from transport.errors import PeerGone, TransportError, WaitTimeout


class Sender:
    """Sends record batches over one edge, to receivers that come and go; not thread-safe, and it never blocks but in
    `close`. A batch goes to the receiver with the most credit.

    The law: a batch that was taken is at any time with one receiver that has not acknowledged it, or waits here for
    credit of another; it is let go only when it was acknowledged. So none is ever lost. It is acknowledged once, but
    for two cases, in which consumers may see it twice and tell by what is in it: its receiver restarted, or was
    forgotten, after delivering it and before the acknowledgement came.
    """

    def __init__(
        self,
        *,
        edge: str,
        sender_id: str,
        epoch: int,
        schema: pa.Schema,
        receivers: Sequence[str],
        network: Network | None = None,
        peer_timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        most_rows: int | None = None,
        counts: EndCounts | None = None,
    ) -> None:
        """Connect to `receivers` (addresses); they may appear later.

        `most_rows` may be unacknowledged with all receivers together, whatever credit they give: so one of them that
        has room for as many can take what others had. A larger batch travels alone.
        `epoch` is larger after each restart of the sender. A receiver that is away for `peer_timeout_s`
        makes `poll` raise PeerGone. Raises AddressError for an address that others could listen at.
        `counts`: go on from those of an earlier attempt; None: from nothing.
        """
        if not receivers:
            raise ValueError(f"edge '{edge}' has no receiver; got an empty list; give at least one address")
        self.edge, self.sender_id, self.epoch, self.schema = edge, sender_id, epoch, schema
        self._peer_timeout_s, self._clock, self._most_rows = peer_timeout_s, clock, most_rows
        self._network = network or SocketNetwork()
        self.counts = counts or EndCounts()
        """What has crossed the edge, and was let go."""
        self._encoder, self._encoded = frames.BatchEncoder(schema), frames.encode_schema(schema)
        self._peers: list[ReceiverPeer] = []
        self._stopped_at: dict[str, int] = {}
        """By address, the number of the next batch for a receiver that left."""
        self._returned: deque[OutgoingBatch] = deque()
        """Batches of receivers that left, which wait for credit of another."""
        for address in receivers:
            self._connect(address)
        self._ending = False
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
        return [socket for peer in self._peers for socket in peer.connection.sockets]

    @property
    def receivers(self) -> list[str]:
        """Addresses of the receivers, those that retire and are not through included."""
        return [peer.address for peer in self._peers]

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
        return room if self._most_rows is None else max(0, min(room, self._most_rows - self._rows()))

    def grow(self, most_rows: int | None) -> None:
        """So many rows may be unacknowledged from now on, where that is more."""
        if self._most_rows is not None and most_rows is not None:
            self._most_rows = max(self._most_rows, most_rows)

    def send(self, batch: pa.RecordBatch, acked: Callable[[Iterable[int]], None] = lambda rows: None) -> bool:
        """Take a batch; False when there is no credit: then nothing was taken, and the caller keeps it.

        acked: called by `poll` with rows by their number, once the receiver has acknowledged them, alone or with the
        rest: with each row once. It must not call this sender.
        Raises SchemaMismatch, BatchTooLarge (it would never fit).
        """
        if self._closed:
            raise TransportError(f"edge '{self.edge}' has ended; got one more batch; send before finish")
        frames.check_schema(batch.schema, self.schema, edge=self.edge)
        size_bytes = self._encoder.size_bytes(batch)
        need = cost(batch.num_rows, size_bytes)
        self._place_returned()
        peer = None if self._returned else self._choose(need)
        if peer is None:
            return False
        payload = peer.connection.pack(batch, self._encoder, size_bytes)
        counts = self.counts.acknowledged
        peer.outbox.add(OutgoingBatch(rows=batch.num_rows, cost=need, payload=payload, acked=acked, counts=counts))
        peer.transmit()
        return True

    def poll(self) -> None:
        """Handle what came back: credit, acknowledgements, connections; send again what has to be.

        Raises PeerGone when a receiver was away for too long, Refused when one says no, BatchTooLarge when what
        a receiver left behind fits none of the others.
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
                if self.drained:
                    break
                waiting = [peer for peer in self._peers if not peer.outbox.drained] or self._peers
                if left <= 0:
                    raise WaitTimeout(self._waiting(waiting, linger_s))
                waiting[0].connection.wait(min(left, 0.1))
        finally:
            for peer in self._peers:
                peer.connection.close()

    def add_receiver(self, address: str) -> None:
        """From now on batches go to `address` too, as soon as it appears and gives credit; read `sockets` again.

        After `finish` it is told the end with the next `poll`, so that `forget_receiver` before that can still give
        it the batches of another. A receiver that left may come back, restarted or not.
        Raises ValueError for an address that it has; AddressError.
        """
        known = next((peer for peer in self._peers if peer.address == address), None)
        if known is not None:
            there = "one that retires and is not through; wait until it is gone from `receivers`"
            raise ValueError(
                f"edge '{self.edge}' has the receiver {address} already; got it again; it is "
                f"{there if known.retiring else 'in use: add each once'}"
            )
        self._connect(address)

    def retire_receiver(self, address: str) -> None:
        """Nothing new goes to `address`; it is told the end of this stream, and leaves when it owes nothing.

        What it was sent is still its own, comes again if it restarts, and is acknowledged as usual. What never
        left goes to the others. Once all is acknowledged and it knows the end, `poll` closes the peer; read `sockets`
        again. If it stays away for `peer_timeout_s` before that, it is forgotten like one that `forget_receiver` names.
        Raises ValueError for an unknown address, one that retires already, and the last receiver.
        """
        peer = self._find(address)
        if peer.retiring:
            raise ValueError(
                f"edge '{self.edge}' lets the receiver {address} go already; got it again; wait, or forget_receiver"
            )
        self._check_not_last(peer)
        peer.retiring = True
        self._returned.extend(peer.outbox.take_back(sent=False))
        peer.end()

    def forget_receiver(self, address: str) -> None:
        """`address` is known to be dead: everything that it did not acknowledge goes to the others, oldest first.

        That waits for their credit, and goes before new batches: until it is placed, `room` is 0 and `send`
        False. After `finish` the streams of the others begin again for it: a receiver that was `finished` is not
        any more. To replace a receiver, add the new one first. One that comes back at the same address is welcome
        (`add_receiver`), even if it was not dead; then it may deliver what others deliver too.
        Raises ValueError for an unknown address, and the last receiver.
        """
        peer = self._find(address)
        self._check_not_last(peer)
        self._forget(peer)
        self._place_returned()

    def move_receiver(self, before: str, now: str) -> None:
        """The receiver at `before` was started again and listens at `now`: what it has not acknowledged goes there.

        Read `sockets` again. Raises ValueError for an unknown address, and for one that another receiver has."""
        peer = self._find(before)
        if now in self.receivers:
            raise ValueError(
                f"edge '{self.edge}' has a receiver at {now}; got it for the one at {before}, too; each has its own"
            )
        peer.move(self._network.connect(now), self._clock())

    def _say_end(self) -> None:
        """Tell the end to all who do not know it; while batches wait for another receiver, that it was none.

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
        who = ", ".join(f"{peer.address} ({peer.outbox.unacknowledged} batches)" for peer in peers)
        homeless = f" and {len(self._returned)} batches without a receiver" if self._returned else ""
        return (
            f"'{self.sender_id}' closed edge '{self.edge}' before everything was acknowledged; waited "
            f"{linger_s:.1f} s for {who}{homeless}; the receiver is stuck or gone: look into its log, or raise linger_s"
        )

    def _connect(self, address: str) -> None:
        outbox = Outbox(
            edge=self.edge,
            sender=self.sender_id,
            epoch=self.epoch,
            schema=self._encoded,
            first=self._stopped_at.get(address, 0),
        )
        connection = self._network.connect(address)
        self._peers.append(
            ReceiverPeer(
                connection, outbox, edge=self.edge, sender=self.sender_id, now=self._clock(), sent=self.counts.sent
            )
        )  # fmt: skip

    def _staying(self) -> list[ReceiverPeer]:
        return [peer for peer in self._peers if not peer.retiring]

    def _choose(self, need: Credit) -> ReceiverPeer | None:
        """Whom a batch goes to now, the one with the most credit; None while there is none. Raises BatchTooLarge."""
        peers = self._staying()
        if self._most_rows is not None and (under_way := self._rows()) and under_way + need.rows > self._most_rows:
            return None
        found = roomiest([peer.outbox.room(need) for peer in peers])
        chosen = None if found is None else peers[found]
        for peer in peers if chosen is None else [chosen]:
            peer.check_fits(need)
        return chosen

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
            f"edge '{self.edge}' has no receiver {address}; it has {', '.join(self.receivers)}; name one of those"
        )

    def _check_not_last(self, peer: ReceiverPeer) -> None:
        if self._staying() == [peer]:
            raise ValueError(
                f"nobody would take the batches of edge '{self.edge}'; {peer.address} is its last receiver; "
                f"add_receiver another one first, or finish"
            )

    def _away_s(self, peer: ReceiverPeer, now: float) -> float:
        return 0.0 if peer.away_since is None else now - peer.away_since

    def _check_presence(self, peer: ReceiverPeer, now: float) -> None:
        away_s = self._away_s(peer, now)
        if away_s > self._peer_timeout_s and not peer.outbox.finished:
            failed = f" after {peer.failures} failed handshakes (wrong keys?)" if peer.failures else ""
            raise PeerGone(
                f"'{self.sender_id}' waited for the receiver of edge '{self.edge}'; {peer.address} was "
                f"away for {away_s:.1f} s{failed}, {peer.outbox.unacknowledged} batches are unacknowledged; "
                f"look into the log of its worker, or raise peer_timeout_s"
            )
