"""The receivers of one edge as their sender has them: they come and go, and what one leaves behind
goes to others."""

from collections import deque
from collections.abc import Callable, Sequence

import pyarrow as pa
import zmq

from transport.data import frames
from transport.data.channel import Network
from transport.data.counts import EndCounts
from transport.data.credit import Credit, next_receiver
from transport.data.outbox import Outbox, OutgoingBatch
from transport.data.receiver_peer import ReceiverPeer
from transport.data.sockets import SocketNetwork
from transport.errors import PeerGone


class ReceiverSet:
    """Who takes the batches of one sender: joined, retired, forgotten and moved by its owner, or
    given up as away for too long."""

    def __init__(
        self,
        *,
        edge: str,
        sender_id: str,
        epoch: int,
        schema: pa.Schema,
        receivers: Sequence[str],
        network: Network | None,
        peer_timeout_s: float,
        clock: Callable[[], float],
        most_rows: int | None,
        slack_rows: int,
        counts: EndCounts | None,
    ) -> None:
        """As `Sender`."""
        if not receivers:
            raise ValueError(
                f"edge '{edge}' has no receiver; got an empty list; give at least one address"
            )
        self.edge, self.sender_id, self.epoch, self.schema = edge, sender_id, epoch, schema
        self._peer_timeout_s, self._clock, self._most_rows = peer_timeout_s, clock, most_rows
        self._slack_rows, self._last = slack_rows, -1
        self._network = network or SocketNetwork()
        self.counts = counts or EndCounts()
        """What has crossed the edge, and was let go."""
        self._encoded = frames.encode_schema(schema)
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
        """Addresses of the receivers, those that retire and are not through included."""
        return [peer.address for peer in self._peers]

    def add_receiver(self, address: str) -> None:
        """From now on batches go to `address` too, as soon as it appears and gives credit; read
        `sockets` again.

        After `finish` it is told the end with the next `poll`, so that `forget_receiver` before
        that can still give it the batches of another. A receiver that left may come back, restarted
        or not. Raises ValueError for an address that it has; AddressError.
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
        """Nothing new goes to `address`; it is told the end of this stream, and leaves when it owes
        nothing.

        What it was sent is still its own, comes again if it restarts, and is acknowledged as usual.
        What never left goes to the others. Once all is acknowledged and it knows the end, `poll`
        closes the peer; read `sockets` again. If it stays away for `peer_timeout_s` before that, it
        is forgotten like one that `forget_receiver` names. Raises ValueError for an unknown
        address, one that retires already, and the last receiver."""
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
        receiver."""
        peer = self._find(address)
        self._check_not_last(peer)
        self._forget(peer)
        self._place_returned()

    def move_receiver(self, before: str, now: str) -> None:
        """The receiver at `before` was started again and listens at `now`: what it has not
        acknowledged goes there.

        Read `sockets` again. Raises ValueError for an unknown address, and for one that another
        receiver has."""
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
            epoch=self.epoch,
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
        BatchTooLarge."""
        peers = self._staying()
        if (
            self._most_rows is not None
            and (under_way := self._rows())
            and under_way + need.rows > self._most_rows
        ):
            return None
        found = next_receiver(
            [peer.outbox.room(need) for peer in peers], last=self._last, slack=self._slack_rows
        )
        if found is None:
            for peer in peers:
                peer.check_fits(need)
            return None
        peers[found].check_fits(need)
        self._last = found
        return peers[found]

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
