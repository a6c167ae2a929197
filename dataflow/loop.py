"""The loop around one operator's runtime: rows in by credit, a slice of work, rows out by credit."""

import collections
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow.errors import boundary
from dataflow.node import Batch, Runtime
from dataflow.records import GROUP_ID


class Inlet(Protocol):
    """The receiving end of an edge (transport.data.Receiver)."""

    def receive(self, timeout_s: float = 0.0) -> Any | None:
        """A delivery with `batch` and `ack`, or None."""

    def poll(self) -> None:
        """Take in what arrived, answer the senders."""

    @property
    def finished(self) -> bool:
        """Whether every sender has ended its stream and all of it was received."""


class Outlet(Protocol):
    """The sending end of an edge (transport.data.Sender)."""

    def send(self, batch: pa.RecordBatch, key: int | None = None) -> bool:
        """False when there is no credit now; then nothing was taken."""

    def poll(self) -> None:
        """Take in grants and acknowledgements."""

    def finish(self) -> None:
        """Say that nothing more will come."""


_MOST_ROWS = 1024
"""Of a batch on the wire, where the edge does not say."""


def whole_groups(records: pa.RecordBatch, most_rows: int) -> list[pa.RecordBatch]:
    """Slices of at most so many rows, cut between groups; a group that is larger by itself stays whole."""
    if records.num_rows <= most_rows:
        return [records]
    ids = records.column(GROUP_ID).to_numpy()
    ends = [*(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]
    parts, start, last = [], 0, 0
    for end in ends:
        if end - start > most_rows and last > start:
            parts.append(records.slice(start, last - start))
            start = last
        last = end
    return [*parts, records.slice(start)]


class NodeLoop:
    """Drives one runtime without ever waiting.

    consumes: deliveries of its inlets, while the runtime has room
    produces: batches on the outlets of their lane; acknowledgements once what they led to was sent
    waits for: credit on its outlets (back-pressured), rows or weights (idle)
    unblocked by: grants and arrivals, noticed at the next `turn`
    """

    def __init__(
        self,
        node: str,
        runtime: Runtime,
        inlets: Sequence[tuple[str, str, Inlet]],
        outlets: Mapping[str, Sequence[Outlet]],
        *,
        most_rows: Mapping[str, int] | None = None,
        mark: Callable[[str, list[int]], None] | None = None,
        span: Callable[[str, float, float], None] = lambda node, begin_s, end_s: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """inlets: (lane, sending node, inlet); outlets by lane; most_rows: of a batch on the wire, by lane;
        mark: writes (lane, group ids) into the ledger; span: is told of every slice of work.
        """
        self.node, self.runtime = node, runtime
        self.paused = False
        self.ended = False
        self.rows_in = self.rows_out = 0
        self.seconds = {"busy": 0.0, "idle": 0.0, "blocked": 0.0}
        self._inlets, self._outlets = inlets, outlets
        self._ends: list[Inlet | Outlet] = [
            *(inlet for _, _, inlet in inlets),
            *(o for each in outlets.values() for o in each),
        ]
        self._most_rows = most_rows or {}
        self._mark, self._span, self._clock = mark, span, clock
        self._outbox: collections.deque[tuple[Outlet, pa.RecordBatch]] = collections.deque()
        self._acks: list[Callable[[], None]] = []
        self._inside: collections.Counter[str] = collections.Counter()
        """Deliveries by lane that the runtime has not acknowledged."""
        self._over: set[str] = set()
        """Lanes whose end was passed on."""
        self._told_end = False

    @property
    def blocked(self) -> bool:
        """Whether finished rows wait for credit."""
        return bool(self._outbox)

    def turn(self) -> bool:
        """One round: send, receive, work. True when anything moved."""
        for end in self._ends:
            end.poll()
        moved = self._flush()
        if self.ended or self._outbox or self.paused:
            return moved
        moved |= self._receive()
        began = self._clock()
        with boundary(self.node, "working"):
            made = self.runtime.work()
        if made is not None:
            ended = self._clock()
            self.seconds["busy"] += ended - began
            self._span(self.node, began, ended)
            self._queue(made)
            self._flush()
            return True
        self._settle()
        return moved | self._end()

    def waited(self, seconds: float) -> None:
        """Account for time that the worker slept while this node had nothing to do, or no credit."""
        self.seconds["blocked" if self._outbox else "idle"] += seconds

    def _receive(self) -> bool:
        moved = False
        for lane, origin, inlet in self._inlets:
            while self.runtime.room() > 0:
                delivery = inlet.receive()
                if delivery is None:
                    break
                moved = True
                self.rows_in += delivery.batch.num_rows
                began = self._clock()
                with boundary(self.node, f"taking rows of '{lane}' from '{origin}'"):
                    self.runtime.push(Batch(lane, delivery.batch, origin, self._later(lane, delivery.ack)))
                self.seconds["busy"] += self._clock() - began
        return moved

    def _later(self, lane: str, ack: Callable[[], None]) -> Callable[[], None]:
        self._inside[lane] += 1

        def acknowledge() -> None:
            self._inside[lane] -= 1
            self._acks.append(ack)

        return acknowledge

    def _queue(self, made: list[Batch]) -> None:
        for batch in made:
            self.rows_out += batch.records.num_rows
            if self._mark is not None:
                self._mark(batch.lane, pc.unique(batch.records.column(GROUP_ID)).to_pylist())
            for part in whole_groups(batch.records, self._most_rows.get(batch.lane, _MOST_ROWS)):
                for outlet in self._outlets.get(batch.lane, ()):
                    self._outbox.append((outlet, part))

    def _flush(self) -> bool:
        moved = False
        while self._outbox and self._outbox[0][0].send(self._outbox[0][1]):
            self._outbox.popleft()
            moved = True
        if not self._outbox:
            self._settle()
        return moved

    def _settle(self) -> None:
        """Carry out the acknowledgements whose consequences have all been sent."""
        acks, self._acks = self._acks, []
        for ack in acks:
            ack()

    def _end(self) -> bool:
        """Pass the end of the stream on once nothing more can come, of a single lane before that of the others."""
        over = all(inlet.finished for _, _, inlet in self._inlets) if self._inlets else self._source_done()
        if not over:
            return self._end_lanes({lane for lane, _, _ in self._inlets if self._lane_over(lane)})
        if self.runtime.pending():
            return False
        if not self._told_end:
            self._told_end = True
            self.runtime.tell({"end": True})
            return True
        self.ended = True
        self._end_lanes(self._outlets)
        return True

    def _lane_over(self, lane: str) -> bool:
        """Whether all rows of a lane have come, and all that they led to has left."""
        return not self._inside[lane] and all(inlet.finished for of, _, inlet in self._inlets if of == lane)

    def _end_lanes(self, lanes: Collection[str]) -> bool:
        ending = [lane for lane in lanes if lane in self._outlets and lane not in self._over]
        for lane in ending:
            self._over.add(lane)
            for outlet in self._outlets[lane]:
                outlet.finish()
        return bool(ending)

    def _source_done(self) -> bool:
        return bool(self.runtime.status().get("done"))
