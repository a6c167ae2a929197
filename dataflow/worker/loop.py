"""The loop around one operator's runtime: rows in by credit, a slice of work, rows out by credit.

What comes in is acknowledged when the next nodes have acknowledged all that it led to
(dataflow.worker.loop).
"""

import collections
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from dataflow.errors import boundary
from dataflow.folder.finished import Finished
from dataflow.folder.trace import NodeSpans
from dataflow.records import GROUP_ID, MESSAGE_BYTES
from dataflow.runtime import Batch, Runtime
from dataflow.tokens.ragged import group_slices, whole_groups
from dataflow.worker.acknowledgements import Acknowledgements
from dataflow.worker.state_clock import State, StateClock
from dataflow.worker.turns import Turns

# The ends of an edge as a node's loop sees them.


Acked: TypeAlias = Callable[[Iterable[int]], None]
"""Called with numbers of a batch's rows once they are acknowledged: with each row once."""


class Inlet(Protocol):
    """The receiving end of an edge (transport.data.Receiver)."""

    def receive(self, timeout_s: float = 0.0) -> Any | None:
        """A delivery with `batch`, `sender`, `ack_rows` and `ack`, or None."""

    def poll(self) -> None:
        """Take in what arrived, answer the senders."""

    def flush(self) -> None:
        """Answer the senders."""

    @property
    def finished(self) -> bool:
        """Whether every sender has ended its stream and all of it was received."""


class Outlet(Protocol):
    """The sending end of an edge (transport.data.Sender)."""

    def send(self, batch: pa.RecordBatch, acked: Acked) -> bool:
        """False when there is no credit now; then nothing was taken."""

    def poll(self) -> None:
        """Take in grants and acknowledgements."""

    def finish(self) -> None:
        """End the stream."""


_MOST_ROWS = 1024
"""The most rows of a batch on the wire, where the edge does not say."""


class NodeLoop:
    """Drives one runtime without ever waiting.

    consumes: deliveries of its inlets, while the runtime has room
    produces: batches on the outlets of their source; acknowledgements once what they led to was
        acknowledged
    waits for: credit on its outlets (blocked), rows or its turn (waiting), weights (starved)
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
        most_bytes: int = MESSAGE_BYTES,
        marks: Mapping[str, Callable[[list[int]], None]] | None = None,
        finished: Mapping[str, Finished] | None = None,
        settled: Callable[[str, list[int]], Collection[int]] | None = None,
        answers: Sequence[tuple[str, str, Inlet]] = (),
        repeated: Mapping[str, Callable[[int, str], None]] | None = None,
        span: Callable[[str, str, float, float], None] = lambda node, what, begin_s, end_s: None,
        turns: Turns | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """inlets: (source, sending node, inlet); outlets, by source; most_rows, by source,
        most_bytes: of a batch sent; marks: by source, what writes down in the ledger how far groups
        are that leave; finished: by source, where what leaves is kept until it has an outcome, and
        found instead of being made again; settled: which of some groups have an outcome already,
        though their sender has not heard of it; answers: inlets of what the runtime asked for
        itself, which is its own as soon as it has come; repeated: see `Acknowledgements`; span: is
        told of every slice of work, and of every stretch between two, by the state of the node;
        turns: on devices that it shares.
        """
        self.node, self.runtime = node, runtime
        self.paused = False
        self.ended = False
        self.rows_in = self.rows_out = 0
        self._inlets, self._outlets, self._answers = inlets, outlets, answers
        self._ends: list[Inlet | Outlet] = [
            *(inlet for _, _, inlet in (*inlets, *answers)),
            *(o for senders in outlets.values() for o in senders),
        ]
        self._most_rows, self._most_bytes = most_rows or {}, most_bytes
        self._marks, self._clock = marks or {}, clock
        self._began = clock()
        self._time = StateClock(self._began)
        self.spans = NodeSpans(node, span, self._began)
        self.turns = turns
        self._outbox: collections.deque[tuple[Outlet, pa.RecordBatch, Acked]] = collections.deque()
        self._finished = finished or {}
        self._settled = settled
        self.acknowledgements = Acknowledgements(released=self._forget, repeated=repeated or {})
        self._done: list[tuple[str, str, list[int]]] = []
        """Source, origin and groups that the runtime released."""
        self._over: set[str] = set()
        """Sources whose end was passed on."""
        self._told_end = False

    @property
    def blocked(self) -> bool:
        """Whether finished rows wait for credit."""
        return bool(self._outbox)

    def report(self) -> dict[str, Any]:
        """The state of its node and how its time was spent, as a node's report has it."""
        return {
            **self.spent(),
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "ended": self.ended,
            "blocked": self.blocked,
            "starved": self._time.state == "starved",
            "paused": self.paused,
            "turn": "" if self.turns is None else self.turns.state,
            "oldest": self.acknowledgements.oldest(),
        }

    def spent(self) -> dict[str, Any]:
        """How its time was spent, and the time since it was made, as a report has them; asked in
        any thread.
        """
        now = self._clock()
        return {"seconds": self._time.read(now), "measured_s": now - self._began}

    def turn(self) -> bool:
        """One round: send, receive, work. True when anything moved."""
        began = self._clock()
        self._time.begin(began)
        moved = self._turn()
        ended, state = self._clock(), self._state()
        beside = 0.0 if self._outbox else self.runtime.beside()
        self._time.end(ended, state, is_work=moved, beside=beside)
        self.spans.turned(began, ended, state, is_work=moved, beside=beside)
        return moved

    def _state(self) -> State:
        """The node's state until its next turn. A node that could go on at once waits for its turn
        at the worker.
        """
        if self._outbox:
            return "blocked"
        return "starved" if self.runtime.starved() else "waiting"

    def _turn(self) -> bool:
        for end in self._ends:
            end.poll()
        self._answer()
        moved = self._flush() | self._take_turns()
        if self.ended:
            return moved | self._pass_over() | self._take_answers()
        moved |= self._take_answers()
        if self._outbox or self.paused:
            return moved
        moved |= self._receive()
        with boundary(self.node, "working"):
            batches = self.runtime.work()
        if batches is not None:
            self._queue(batches)
            self._settle()
            self._flush()
            return True
        self._settle()
        return moved | self._end()

    def close(self) -> None:
        """End the files of what it has finished."""
        for finished in self._finished.values():
            finished.close()

    def _take_turns(self) -> bool:
        """Give the devices up, or take them, where others share them and it is time; what that
        takes is work.
        """
        if self.turns is None:
            return False
        with boundary(self.node, "taking its turn"):
            return self.turns.turn(self.runtime, held_up=bool(self._outbox))

    def _take_answers(self) -> bool:
        """Give the runtime what it asked for, also while rows wait for credit: the node that
        answers may wait for that of its answers. One that has ended wants no more.
        """
        moved = False
        for source, origin, inlet in self._answers:
            while (delivery := inlet.receive()) is not None:
                moved = True
                if not self.ended:
                    with boundary(self.node, f"taking answers from '{origin}'"):
                        self.runtime.push(Batch(source, delivery.batch, origin))
                delivery.ack()
            inlet.flush()
        return moved

    def _receive(self) -> bool:
        moved = False
        for source, origin, inlet in self._inlets:
            while self.runtime.room() > 0:
                delivery = inlet.receive()
                if delivery is None:
                    break
                moved = True
                self.rows_in += delivery.batch.num_rows
                with boundary(self.node, f"taking rows of '{source}' from '{origin}'"):
                    self._take(source, origin, delivery)
        return moved

    def _take(self, source: str, origin: str, delivery: Any) -> None:
        """Push what is new of a delivery; what was finished before leaves at once, what has an
        outcome is let go.
        """
        new = self._arrive(source, origin, delivery)
        settled = set() if self._settled is None else set(self._settled(source, new))
        finished = self._found(source, [group for group in new if group not in settled])
        for group, rows in finished.items():
            self._put(source, rows, [group])
        unfinished = {group for group in new if group not in settled and group not in finished}
        self._done.append((source, origin, [group for group in new if group not in unfinished]))
        if unfinished:
            rows = delivery.batch
            mine = pc.is_in(rows.column(GROUP_ID), pa.array(sorted(unfinished), pa.int64()))
            rows = rows if pc.all(mine).as_py() else rows.filter(mine)
            self.runtime.push(
                Batch(source, rows, origin, partial(self._release, source, origin, unfinished))
            )

    def _arrive(self, source: str, origin: str, delivery: Any) -> list[int]:
        """Answer for the groups of a delivery from now on; those that are new."""
        acks = {
            group: partial(delivery.ack_rows, *rows)
            for group, *rows in group_slices(delivery.batch)
        }
        if not acks:
            delivery.ack()
        return self.acknowledgements.arrive(source, origin, acks, delivery.sender)

    def _release(self, source: str, origin: str, groups_left: set[int], group: int) -> None:
        """The runtime is done with a group; left: those of its batch with which it was not."""
        if group in groups_left:
            groups_left.remove(group)
            self._done.append((source, origin, [group]))

    def _queue(self, batches: list[Batch]) -> None:
        for batch in batches:
            groups = [group for group, _, _ in group_slices(batch.records)]
            if groups and batch.source in self._finished:
                self._finished[batch.source].append(batch.records)
            if groups:
                self._put(batch.source, batch.records, groups)

    def _put(self, source: str, records: pa.RecordBatch, groups: list[int]) -> None:
        """Queue rows for every outlet of their source."""
        self.rows_out += records.num_rows
        if source in self._marks:
            self._marks[source](groups)
        outlets = self._outlets.get(source, ())
        self.acknowledgements.sent(source, groups, len(outlets))
        for part in whole_groups(
            records, self._most_rows.get(source, _MOST_ROWS), self._most_bytes
        ):
            acked = partial(
                self._acked, source, {first: group for group, first, _ in group_slices(part)}
            )
            self._outbox += [(outlet, part, acked) for outlet in outlets]

    def _found(self, source: str, groups: list[int]) -> dict[int, pa.RecordBatch]:
        """Groups that were finished before, of these."""
        finished = self._finished.get(source)
        rows_of = {group: finished.find(group) for group in groups} if finished is not None else {}
        return {group: rows for group, rows in rows_of.items() if rows is not None}

    def _forget(self, group: tuple[str, int]) -> None:
        """Delete what was kept of a group that has an outcome."""
        source, number = group
        if source in self._finished:
            self._finished[source].forget(number)
        self.runtime.forget(source, number)

    def _flush(self) -> bool:
        moved = False
        while self._outbox:
            outlet, part, acked = self._outbox[0]
            if not outlet.send(part, acked):
                break
            self._outbox.popleft()
            moved = True
        return moved

    def _acked(self, source: str, firsts: Mapping[int, int], rows: Iterable[int]) -> None:
        """The next node is done with rows; firsts: of each group, by its first row."""
        self.acknowledgements.acknowledged(source, [firsts[row] for row in rows if row in firsts])

    def _settle(self) -> None:
        """Count the released groups as done, once all their rows are on their way."""
        done, self._done = self._done, []
        for source, origin, groups in done:
            self.acknowledgements.done(source, origin, groups)
        self._answer()

    def _answer(self) -> None:
        """Let senders hear in this turn of what was let go in it: how many turns there are is a
        matter of timing, which leaves no trace in a run in one process.
        """
        for _, _, inlet in self._inlets:
            inlet.flush()

    def _pass_over(self) -> bool:
        """After the end only what is known already comes, from a node that restarted."""
        moved = False
        for source, origin, inlet in self._inlets:
            while (delivery := inlet.receive()) is not None:
                moved = True
                self.acknowledgements.done(source, origin, self._arrive(source, origin, delivery))
        return moved

    def _end(self) -> bool:
        """Pass the end of the stream on once nothing more can come, of a single source before that
        of the others.
        """
        over = (
            all(inlet.finished for _, _, inlet in self._inlets)
            if self._inlets
            else self._source_done()
        )
        if not over:
            return self._end_sources(
                {source for source, _, _ in self._inlets if self._source_over(source)}
            )
        if self.runtime.pending():
            return False
        if not self._told_end:
            self._told_end = True
            self.runtime.tell({"end": True})
            return True
        self.ended = True
        self._end_sources(self._outlets)
        return True

    def _source_over(self, source: str) -> bool:
        """Whether all rows of a source have come and all that they led to has left, found rows as
        well as made ones.
        """
        all_came = all(inlet.finished for of, _, inlet in self._inlets if of == source)
        return all_came and not self._outbox and not self.acknowledgements.inside(source)

    def _end_sources(self, sources: Collection[str]) -> bool:
        ending = [
            source for source in sources if source in self._outlets and source not in self._over
        ]
        for source in ending:
            self._over.add(source)
            for outlet in self._outlets[source]:
                outlet.finish()
        return bool(ending)

    def _source_done(self) -> bool:
        return bool(self.runtime.status().get("done"))
