"""The receiving end of a data edge: grants credit, checks what arrives, delivers every batch once.

Consumes: messages of any number of senders.
Produces: deliveries, in order per sender; credit and acknowledgements to the senders.
Waits for: a batch, at most `timeout_s`.
Unblocked by: `Sender.send`; and it unblocks senders by `Delivery.ack`.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import pyarrow as pa
import zmq

from transport.data import messages
from transport.data.counts import EndCounts
from transport.data.credit import Credit
from transport.data.inbox import Inbox, Replies
from transport.data.local import Delivery
from transport.data.messages import Data, Hello
from transport.data.sockets import Arrival, Junk, Network, SocketNetwork
from transport.errors import FrameError
from transport.life import Life, Refused

log = logging.getLogger(__name__)

_REMEMBERED_PEERS = 1024
_STEPS_PER_CALL = 1000
_MOST_QUEUED = 1 << 20
"""Messages that a socket queues; what is beyond waits with the senders."""


def _warn(edge: str, peer: str, reason: str) -> None:
    log.warning("refused a message on edge '%s' from %s: %s", edge, peer, reason)


class Receiver:
    """Receives record batches of one edge; not thread-safe.

    At any time the unacknowledged batches stay within `capacity_rows` and `capacity_bytes`, shared
    equally among the senders. A batch within the capacity but larger than its sender's share
    travels alone; choose capacity_bytes >= senders * bytes of the largest batch, and the bound
    holds for those too. One that is larger than max_message_bytes comes in parts, under the credit
    of the whole, and is put together here. Redelivery: a batch is delivered once by one receiver.
    When a receiver restarts, what was unacknowledged comes again, so a consumer that acted on a
    batch and died before `ack` sees it twice.
    """

    def __init__(
        self,
        *,
        edge: str,
        schema: pa.Schema,
        address: str,
        life: Life,
        capacity_rows: int,
        capacity_bytes: int = 256 << 20,
        max_message_bytes: int = 64 << 20,
        senders: int = 1,
        network: Network | None = None,
        on_refused: Callable[[str, str, str], None] = _warn,
        counts: EndCounts | None = None,
    ) -> None:
        """Bind to `address`: `ipc://PATH` in a 0700 folder, `tcp://127.0.0.1:*`, or elsewhere with
        keys. `life` is larger after each restart of the receiver.

        `senders` are expected: `finished` waits for as many, and until they come their share is
        kept for them. `on_refused(edge, peer, reason)` hears once of every peer that sends what
        cannot be taken. `counts`: go on from those of an earlier attempt; None: from nothing.
        Raises AddressError, and ValueError for a capacity that holds no row per sender.
        """
        if (
            capacity_rows < max(1, senders)
            or capacity_bytes < max(1, senders)
            or max_message_bytes < 1
        ):
            raise ValueError(
                f"edge '{edge}' could hold nothing of its {senders} senders; got {capacity_rows=}, "
                f"{capacity_bytes=}, {max_message_bytes=}; raise them"
            )
        self.edge, self.schema = edge, schema
        self.counts = counts or EndCounts()
        """What has arrived."""
        self._inbox = Inbox(
            edge=edge,
            life=life,
            capacity=Credit(rows=capacity_rows, bytes=capacity_bytes),
            senders=senders,
            max_message_bytes=max_message_bytes,
        )
        self._begun: dict[str, Any] = {}
        """By sender, what has come of a batch whose later parts have not."""
        self._listener = (network or SocketNetwork()).listen(
            address,
            max_message_bytes=max_message_bytes,
            queue_messages=min(capacity_rows, _MOST_QUEUED),
        )
        self._ready: deque[Delivery] = deque()
        self._on_refused = on_refused
        self._blamed: set[Hashable] = set()
        self._closed = False
        self.refused = 0
        """Messages that were not taken: damaged, oversized, of another schema, of no known peer."""
        self.duplicates = 0
        """Batches that had arrived before, and were not delivered again."""

    @property
    def address(self) -> str:
        """Where senders find this receiver, with the real port."""
        return self._listener.address

    @property
    def socket(self) -> "zmq.Socket[bytes] | None":
        """The socket that messages arrive on; None within one process."""
        return next(iter(self.sockets), None)

    @property
    def sockets(self) -> "list[zmq.Socket[bytes]]":
        """All that a poller should watch for reading: `receive` or `poll` when any of them is
        ready.
        """
        return list(self._listener.sockets)

    @property
    def depth(self) -> tuple[int, int]:
        """Rows that arrived and are not acknowledged, delivered or not; and bytes of the batches
        that have any.
        """
        depth = self._inbox.depth
        return depth.rows - self._inbox.early_rows, depth.bytes

    @property
    def finished(self) -> bool:
        """Whether all expected and all known senders ended, and everything was delivered."""
        return self._inbox.ended and not self._ready

    def receive(self, timeout_s: float = 0.0) -> Delivery | None:
        """The next batch; None when none came within the timeout, or at once when the stream has
        ended.
        """
        deadline = time.monotonic() + timeout_s
        for _ in range(_STEPS_PER_CALL):
            if self._ready:
                return self._ready.popleft()
            if self._step(0.0):
                continue
            self.flush()
            remaining_s = deadline - time.monotonic()
            if timeout_s <= 0 or remaining_s <= 0 or self.finished or not self._step(remaining_s):
                return None
        return None

    def poll(self) -> None:
        """Take in what arrived, without delivering it, and send what is due: call it when not
        receiving.
        """
        for _ in range(_STEPS_PER_CALL):
            if not self._step(0.0):
                break
        self.flush()

    def flush(self) -> None:
        """Send the acknowledgements that are due, without taking anything in."""
        self._reply(self._inbox.flush())

    def expect(self, senders: int) -> None:
        """From now on `senders` are expected in all, those that ended or were forgotten included.

        `finished` waits for as many, and the capacity is shared out anew: at once to whoever gains
        by it, and to a joiner as soon as the others confirmed their smaller windows. Say it before
        the present senders end, because a consumer acts on `finished`; a joiner whose stream begins
        later is served too, and makes `finished` false again. A sender counts once by its name,
        whatever its life: a joiner needs a name that nobody had. Lower the number for one that
        will never come; after one that ended, it need not change. Raises ValueError when the
        capacity holds no row or byte for each that may still send.
        """
        awaited = self._inbox.awaited(senders)
        if senders < 0 or min(self._inbox.capacity.rows, self._inbox.capacity.bytes) < awaited:
            raise ValueError(
                f"edge '{self.edge}' cannot expect {senders} senders; got room for"
                f" {self._inbox.capacity.rows} rows and {self._inbox.capacity.bytes} bytes among"
                f" the {awaited} that may still send; expect fewer, or raise the capacity"
            )
        self._reply(self._inbox.expect(senders))

    def grow(self, capacity_rows: int) -> None:
        """Hold at least so many rows from now on; the senders are told."""
        self._reply(self._inbox.grow(capacity_rows))

    def over(self, sender: str) -> None:
        """A sender whose stream an earlier incarnation of this receiver had to its end counts as
        ended here.

        If it comes all the same, it is served like any other.
        """
        self._inbox.over(sender)

    def forget(self, sender: str) -> None:
        """A sender that will not come back counts as ended, and its share goes to the others.

        What arrived of it is taken in first, and delivered. One of whom nothing ever arrived is
        unknown here: for that, `expect` one less.
        """
        self.poll()
        self._begun.pop(sender, None)
        self._reply(self._inbox.forget(sender))

    def close(self) -> None:
        """Stop listening; what is unacknowledged will go to the next receiver at this address."""
        if not self._closed:
            self.flush()
            self._closed = True
            self._listener.close()

    def _step(self, timeout_s: float) -> bool:
        """Handle one arrival; False when there was none."""
        arrival = self._listener.get(timeout_s)
        match arrival:
            case None:
                return False
            case Junk():
                self._refuse(arrival.connection, arrival.reason)
            case Arrival(message=Hello() as hello):
                self._greet(arrival.connection, hello)
            case Arrival(message=Data() as data):
                self._take(arrival, data)
            case _:
                self._refuse(arrival.connection, "a message that only receivers send")
        return True

    def _greet(self, connection: Hashable, hello: Hello) -> None:
        try:
            if hello.edge != self.edge:
                raise FrameError(
                    f"'{hello.sender}' sends on edge '{hello.edge}'; this is edge '{self.edge}'; "
                    "give it the address of its own edge"
                )
            messages.check_schema(messages.decode_schema(hello.schema), self.schema, edge=self.edge)
        except FrameError as error:
            self._refuse(connection, str(error))
            self._listener.put(connection, Refused(str(error)))
            return
        self._begun.pop(hello.sender, None)
        self._reply(self._inbox.hello(connection, hello))

    def _take(self, arrival: Arrival, data: Data) -> None:
        self.counts.received.add(not data.left, 0 if data.left else data.rows, data.part_bytes)
        verdict, replies = self._inbox.judge(arrival.connection, data)
        if verdict in ("new", "part"):
            try:
                batch = self._open(arrival.payload, data)
            except FrameError as error:
                self._refuse(arrival.connection, str(error))
                replies = self._inbox.fault(data, str(error))
            else:
                self._count_in(data, batch)
        elif verdict == "duplicate":
            self.duplicates += not data.left
        elif verdict == "overrun":
            self._refuse(
                arrival.connection, f"'{data.sender}' sent {data.rows} rows without credit"
            )
        self._reply(replies)

    def _open(self, payload: Any, data: Data) -> pa.RecordBatch | None:
        """The batch, or None until its last part is here. Raises FrameError; then nothing is left
        of it.
        """
        begun = self._begun.pop(data.sender, None)
        if not data.offset:
            begun = None  # of a batch that is sent again from its first part on
        if data.part_bytes < 1 or data.bytes > self._inbox.capacity.bytes:
            raise FrameError(
                f"a batch of '{data.sender}' has no room here; got {data.part_bytes} of"
                f" {data.bytes} bytes, this receiver holds {self._inbox.capacity.bytes}; send"
                " smaller batches or raise capacity_bytes"
            )
        body = self._listener.assemble(begun, payload, data)
        if data.left:
            self._begun[data.sender] = body
            return None
        return self._listener.open(body, data, self.schema)

    def _count_in(self, data: Data, batch: pa.RecordBatch | None) -> None:
        if batch is None:
            self._inbox.begin(data)
            return
        self._inbox.take(data)
        self._ready.append(
            Delivery(
                batch=batch,
                sender=data.sender,
                life=data.life,
                sequence=data.sequence,
                acknowledge=self._acknowledge,
                acknowledge_rows=self._inbox.acknowledge_rows,
            )
        )

    def _acknowledge(self, sender: str, life: Life, sequence: int) -> None:
        self._reply(self._inbox.acknowledge(sender, life, sequence))
        if not self._ready and not self._closed and not self._listener.waiting():
            self.flush()

    def _reply(self, replies: Replies) -> None:
        if self._closed:
            return
        for connection, message in replies:
            self._listener.put(connection, message)

    def _refuse(self, connection: Hashable, reason: str) -> None:
        self.refused += 1
        if connection not in self._blamed and len(self._blamed) < _REMEMBERED_PEERS:
            self._blamed.add(connection)
            self._on_refused(
                self.edge,
                connection.hex() if isinstance(connection, bytes) else str(connection),
                reason,
            )
