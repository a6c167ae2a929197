"""The sending end of a data edge: credit, acknowledgement, redelivery, and the receivers that share
what is sent.

Consumes: record batches from `send`, acknowledgements and credit from receivers.
Produces: batches to one or several receivers, in order to each.
Waits for: nothing; `send` returns False when there is no credit. Only `close(linger_s)` waits.
Unblocked by: `Delivery.ack` at the receiver.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa
import zmq

from transport.data import frames
from transport.data.channel import Network
from transport.data.counts import EndCounts
from transport.data.credit import cost
from transport.data.outbox import OutgoingBatch
from transport.data.receiver_peer import ReceiverPeer
from transport.data.receivers import ReceiverSet
from transport.errors import TransportError, WaitTimeout


class Sender(ReceiverSet):
    """Sends record batches over one edge, to receivers that come and go; not thread-safe, and it
    never blocks but in `close`. A batch goes to the receiver with the most credit, or in turn where
    these differ by `slack_rows` at most.

    The law: a batch that was taken is at any time with one receiver that has not acknowledged it,
    or waits here for credit of another; it is let go only when it was acknowledged. So none is ever
    lost. It is acknowledged once, but for two cases, in which consumers may see it twice and tell
    by what is in it: its receiver restarted, or was forgotten, after delivering it and before the
    acknowledgement came."""

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
        slack_rows: int = 0,
        counts: EndCounts | None = None,
    ) -> None:
        """Connect to `receivers` (addresses); they may appear later.

        `most_rows` may be unacknowledged with all receivers together, whatever credit they give: so
        one of them that has room for as many can take what others had. A larger batch travels
        alone. `epoch` is larger after each restart of the sender. A receiver that is away for
        `peer_timeout_s` makes `poll` raise PeerGone. Raises AddressError for an address that others
        could listen at. `counts`: go on from those of an earlier attempt; None: from nothing.
        """
        super().__init__(
            edge=edge,
            sender_id=sender_id,
            epoch=epoch,
            schema=schema,
            receivers=receivers,
            network=network,
            peer_timeout_s=peer_timeout_s,
            clock=clock,
            most_rows=most_rows,
            slack_rows=slack_rows,
            counts=counts,
        )
        self._encoder = frames.BatchEncoder(schema)
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
        frames.check_schema(batch.schema, self.schema, edge=self.edge)
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
        who = ", ".join(f"{peer.address} ({peer.outbox.unacknowledged} batches)" for peer in peers)
        homeless = (
            f" and {len(self._returned)} batches without a receiver" if self._returned else ""
        )
        return (
            f"'{self.sender_id}' closed edge '{self.edge}' before everything was acknowledged;"
            f" waited {linger_s:.1f} s for {who}{homeless}; the receiver is stuck or gone: look"
            " into its log, or raise linger_s"
        )
