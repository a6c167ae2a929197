"""The sending end of an edge of answers whose receivers are several replicas: each gets what it has
asked for.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from transport.data.sender import Sender

Acked = Callable[[Iterable[int]], None]


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
        askers: Callable[[pa.RecordBatch], Sequence[Collection[int]]],
    ) -> None:
        """senders: to one replica each, in their order. askers: of a batch, by row the numbers of
        the replicas that asked for it.
        """
        self._senders, self._askers = list(senders), askers
        self._waiting: list[deque[tuple[pa.RecordBatch, Acked]]] = [deque() for _ in senders]
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
        for row, askers in enumerate(self._askers(batch)):
            for replica in askers or range(len(self._senders)):
                rows_of.setdefault(replica, []).append(row)
        owed = Counter(row for rows in rows_of.values() for row in rows)

        def heard(rows: Sequence[int], some: Iterable[int]) -> None:
            owed.subtract(acked_rows := [rows[at] for at in some])
            acked([row for row in acked_rows if not owed[row]])

        for replica, rows in rows_of.items():
            part = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
            self._waiting[replica].append((part, partial(heard, rows)))
        self._flush()
        return True

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
