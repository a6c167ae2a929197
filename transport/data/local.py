"""An edge within one process: batches are handed on as they are, by the rules of credit and
acknowledgement that hold between processes. Drive both ends from one thread.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pyarrow as pa

from transport.data import messages
from transport.data.counts import EndCounts
from transport.data.credit import NONE, Credit, check_fits, cost, may_send
from transport.errors import TransportError
from transport.life import Life

# One batch in the hands of a consumer, and its acknowledgement.


@dataclass(kw_only=True, slots=True)
class Delivery:
    """One batch in the consumer's hands."""

    batch: pa.RecordBatch
    """The rows, checked; its buffers may lie in the memory of the message that brought them."""
    sender: str
    """Who sent it."""
    life: Life
    """Of the sender."""
    sequence: int
    """Its number, 0, 1, 2, ... per sender and life; it goes on when this receiver left and joins
    again."""
    acknowledge: Callable[[str, Life, int], None]
    """The receiver's side, of all rows."""
    acknowledge_rows: Callable[[str, Life, int, int, int], None]
    """The receiver's side, of some rows before the others."""

    left: int = field(init=False)
    """Rows that are not acknowledged."""

    def __post_init__(self) -> None:
        self.left = self.batch.num_rows

    def ack(self) -> None:
        """The consumer is done with all rows: credit returns, the sender forgets the batch. Twice
        does no harm.
        """
        self.left = 0
        self.acknowledge(self.sender, self.life, self.sequence)

    def ack_rows(self, first: int, count: int) -> None:
        """The consumer is done with some rows, each of which it names once. With the last of them
        all is as after `ack`; before that the sender hears of them with the next `flush`, and the
        batch keeps its credit.
        """
        self.left -= count
        if self.left > 0:
            self.acknowledge_rows(self.sender, self.life, self.sequence, first, count)
        else:
            self.acknowledge(self.sender, self.life, self.sequence)


Acked = Callable[[Iterable[int]], None]


class LocalInlet:
    """The end that receives. Its sender is one, and is there as long as it is."""

    def __init__(
        self,
        *,
        edge: str,
        schema: pa.Schema,
        sender: str,
        capacity_rows: int,
        capacity_bytes: int,
        counts: EndCounts | None = None,
    ) -> None:
        """Of what is unacknowledged it holds so many rows and bytes at most. counts: of both
        ends.
        """
        self.counts = counts or EndCounts()
        """What has crossed the edge, by the bytes that it would have on a wire, which credit
        counts, too."""
        self.edge, self.schema, self.sender = edge, schema, sender
        self.capacity = Credit(rows=capacity_rows, bytes=capacity_bytes)
        self.used = NONE
        """What is unacknowledged takes of that."""
        self.ended = False
        """Whether nothing more will be put in."""
        self.heard: deque[tuple[Acked, list[int]]] = deque()
        """Acknowledgements that the sending end has not heard of."""
        self._ready: deque[Delivery] = deque()
        self._held: dict[int, tuple[Credit, Acked, set[int], int]] = {}
        """By number of a batch: what it takes, who hears of its rows, those that are not
        acknowledged, and how many it has."""
        self._next = 0

    def grow(self, capacity_rows: int) -> None:
        self.capacity = self.capacity.most(Credit(rows=capacity_rows, bytes=1))

    @property
    def depth(self) -> tuple[int, int]:
        """Rows that are not acknowledged, delivered or not; and bytes of the batches that have
        any.
        """
        return self.rows, self.used.bytes

    @property
    def rows(self) -> int:
        """Rows that are not acknowledged, alone or with their batch."""
        return sum(len(rows) for _, _, rows, _ in self._held.values())

    @property
    def batches(self) -> int:
        """Batches that are not acknowledged."""
        return len(self._held)

    @property
    def finished(self) -> bool:
        """Whether the sender has ended, and everything was delivered."""
        return self.ended and not self._ready

    def put(self, batch: pa.RecordBatch, takes: Credit, acked: Acked) -> None:
        """Take in a batch for which there is room."""
        self.counts.sent.add(1, batch.num_rows, takes.bytes)
        self.counts.received.add(1, batch.num_rows, takes.bytes)
        self._held[self._next] = takes, acked, set(range(batch.num_rows)), batch.num_rows
        self.used += takes
        self._ready.append(
            Delivery(
                batch=batch,
                sender=self.sender,
                life=Life(),
                sequence=self._next,
                acknowledge=self._acknowledge,
                acknowledge_rows=self._acknowledge_rows,
            )
        )
        self._next += 1

    def receive(self, timeout_s: float = 0.0) -> Delivery | None:
        """The next batch, if there is one: nothing comes in one process while one waits."""
        return self._ready.popleft() if self._ready else None

    def poll(self) -> None:
        """Nothing is under way."""

    def flush(self) -> None:
        """The sending end gets them with its next `poll`."""

    def _acknowledge(self, sender: str, life: Life, number: int) -> None:
        if number in self._held:
            takes, acked, rows, count = self._held.pop(number)
            self.used -= takes
            self.counts.acknowledged.add(1, count, takes.bytes)
            self.heard.append((acked, sorted(rows)))

    def _acknowledge_rows(
        self, sender: str, life: Life, number: int, first: int, count: int
    ) -> None:
        if number in self._held:
            _, acked, unacked, _ = self._held[number]
            self.heard.append((acked, sorted(unacked.intersection(range(first, first + count)))))
            unacked.difference_update(range(first, first + count))


class LocalOutlet:
    """The end that sends."""

    def __init__(self, inlet: LocalInlet, *, most_rows: int | None = None) -> None:
        """most_rows: that may be unacknowledged; a larger batch travels alone."""
        self._inlet, self._most_rows = inlet, most_rows
        self._encoder = messages.BatchEncoder(inlet.schema)

    def grow(self, most_rows: int | None) -> None:
        if self._most_rows is not None and most_rows is not None:
            self._most_rows = max(self._most_rows, most_rows)

    @property
    def unacknowledged(self) -> int:
        """Batches whose acknowledgement has not arrived."""
        return self._inlet.batches

    @property
    def drained(self) -> bool:
        """Whether every batch is acknowledged, and the acknowledgements have arrived."""
        return not self._inlet.batches and not self._inlet.heard

    def send(self, batch: pa.RecordBatch, acked: Acked = lambda rows: None) -> bool:
        """As `Sender.send`: False when there is no credit, and then nothing was taken.

        Raises SchemaMismatch, FrameError for a batch that is not valid, BatchTooLarge (it would
        never fit).
        """
        inlet = self._inlet
        if inlet.ended:
            raise TransportError(
                f"edge '{inlet.edge}' has ended; got one more batch; send before finish"
            )
        messages.check_schema(batch.schema, inlet.schema, edge=inlet.edge)
        need = cost(batch.num_rows, self._encoder.size_bytes(batch))
        check_fits(need, inlet.capacity, edge=inlet.edge)
        rows = inlet.rows
        if not may_send(need, inlet.used, inlet.capacity):
            return False
        if self._most_rows is not None and rows and rows + need.rows > self._most_rows:
            return False
        messages.check_valid(batch, f"a batch of '{inlet.sender}'")
        inlet.put(batch, need, acked)
        return True

    def poll(self) -> None:
        """Hear what was acknowledged."""
        while self._inlet.heard:
            acked, rows = self._inlet.heard.popleft()
            acked(rows)

    def finish(self) -> None:
        """Nothing more will be sent."""
        self._inlet.ended = True
