"""The runtime of a scorer: rows in, the same rows with one more column out, their failures recorded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.errors import RecordError
from dataflow.records import DROP_REASON, ERROR, GROUP_ID, AnyArray, gather
from dataflow.runtime import Batch, Context, Runtime
from dataflow.scoring.callers import Caller, caller_of
from dataflow.scoring.knobs import ScorerKnobs
from dataflow.scoring.pool import Answer
from dataflow.scoring.values import encode, error_column, unpack

_ROOM = 2048
_HOLD_S = 0.05


def build(scorer: ScorerKnobs[..., Any], context: Context) -> "Scoring":
    """The runtime of a scorer; forks its pool's server where it is isolated."""
    return Scoring(scorer, context, caller_of(scorer))


@dataclass
class _Held:
    """A batch whose rows are being scored."""

    batch: Batch
    group_of_row: AnyArray
    """Number of the row's group within the batch, int [rows]."""
    good: AnyArray
    """Rows that are scored, int [good]."""
    starts: AnyArray
    """Where the rows of each call begin in `good`, int [calls + 1]."""
    calls_left: AnyArray
    """Unanswered calls of each group, int [groups]."""
    since: float
    """When something was last sent of it, in seconds."""
    scores: list[pa.Array] = field(default_factory=list)
    """What was said of its rows so far."""
    scored: list[AnyArray] = field(default_factory=list)
    """Which rows these are, int [rows of each]."""
    failures: dict[int, str] = field(default_factory=dict)
    is_sent: AnyArray = field(init=False)
    """Which groups have left, bool [groups]."""

    def __post_init__(self) -> None:
        self.is_sent = np.zeros(len(self.calls_left), bool)


class Scoring(Runtime):
    """Scores rows that have no error and were not dropped, and passes every row on.

    consumes: batches, up to about 2,000 rows at a time
    produces: their groups, each once and whole, in the order in which they are ready
    waits for: the processes of its pool
    unblocked by: their answers, or the limits of time and memory
    """

    def __init__(self, scorer: ScorerKnobs[..., Any], context: Context, caller: Caller) -> None:
        self._scorer = scorer
        self._clock = context.clock
        self._log = context.log
        self._caller = caller
        self._room = max(_ROOM, 4 * scorer.processes * scorer.concurrency)
        self._held: dict[int, _Held] = {}
        self._done: list[_Held] = []
        self._rows = self._scored = self._failed = 0

    def room(self) -> int:
        """Rows it would take now."""
        return max(0, self._room - self._rows)

    def pending(self) -> int:
        """Rows taken in and not yet returned."""
        return self._rows

    def waits(self) -> Sequence[Any]:
        """The pool's descriptor, while calls are open."""
        return self._caller.waits() if self._caller.open_calls else ()

    def push(self, batch: Batch) -> None:
        """Take a batch in and have its rows scored; RecordError when a column is missing."""
        records, reads = batch.records, list(self._scorer.reads())
        missing = [name for name in reads if name not in records.schema.names]
        if missing:
            raise RecordError(
                f"'{self._scorer.name}' reads column '{missing[0]}', its rows have {records.schema.names}; "
                f"add it to Prompts(columns=...) or apply the operator that writes it first"
            )
        group_of_row = _groups(records)
        good = np.flatnonzero(_is_good(records))
        rows = records.select(reads)
        rows = rows if len(good) == len(group_of_row) else rows.take(pa.array(good))
        groups = int(group_of_row[-1]) + 1 if len(group_of_row) else 0
        calls_left = np.bincount(group_of_row[good], minlength=groups)
        if self._scorer.per == "row":
            starts = np.arange(len(good) + 1)
        else:
            starts = np.concatenate([[0], np.cumsum(calls_left[calls_left > 0])]).astype(np.int64)
            calls_left = (calls_left > 0).astype(np.int64)
        held = _Held(
            batch=batch,
            group_of_row=group_of_row,
            good=good,
            starts=starts,
            calls_left=calls_left,
            since=self._clock(),
        )
        self._rows += records.num_rows
        if len(good):
            calls = len(starts) - 1
            self._held[self._caller.submit(calls, partial(encode, rows, starts, self._scorer.per))] = held
        else:
            self._done.append(held)

    def work(self) -> list[Batch] | None:
        """The groups that are ready now."""
        for answer in self._caller.poll():
            self._take(answer)
        ready: list[Batch] = []
        for held in self._done:
            ready += self._leave(held, is_last=True)
        self._done.clear()
        now = self._clock()
        for held in self._held.values():
            if now - held.since > _HOLD_S:
                held.since = now
                ready += self._leave(held, is_last=False)
        return ready or None

    def beside(self) -> float:
        """The share of its pool that makes calls."""
        return self._caller.at_work

    def status(self) -> dict[str, float | int | str]:
        """Rows waiting, scored and failed, and how often a process was replaced."""
        return {
            "queue": self._rows,
            "scored": self._scored,
            "failed": self._failed,
            "restarts": self._caller.restarts,
        }

    def close(self) -> None:
        """End its processes."""
        self._caller.close()

    def _take(self, answer: Answer) -> None:
        held = self._held[answer.job]
        made = [call for call in answer.calls if call not in answer.failures]
        if made:
            rows = held.good[made if self._scorer.per == "row" else gather(held.starts, np.array(made))[0]]
            scores, failures = unpack(self._scorer, answer.body)
            assert len(scores) == len(rows), "one for each"
            held.scores.append(scores)
            held.scored.append(rows)
            for at, text in failures.items():
                self._fail(held, rows[at : at + 1], text)
        for call, text in answer.failures.items():
            self._fail(held, held.good[held.starts[call] : held.starts[call + 1]], text)
        np.subtract.at(held.calls_left, held.group_of_row[held.good[held.starts[answer.calls]]], 1)
        if not held.calls_left.any():
            del self._held[answer.job]
            self._done.append(held)

    def _fail(self, held: _Held, rows: AnyArray, text: str) -> None:
        for row in rows.tolist():
            held.failures[row] = f"{self._scorer.name}: {text}"
        self._failed += len(rows)

    def _leave(self, held: _Held, is_last: bool) -> list[Batch]:
        """The groups of a batch that are ready and have not left; the last of them acknowledge it."""
        leaves = (held.calls_left == 0) & ~held.is_sent
        if not is_last and not leaves.any():
            return []
        held.is_sent |= leaves
        records = self._scored_records(held)
        if not leaves.all():
            records = records.filter(pa.array(leaves[held.group_of_row]))
        self._rows -= records.num_rows
        self._scored += records.num_rows
        if is_last:
            if held.failures:
                reason = next(iter(held.failures.values()))
                self._log.warning("rows without a score", rows=len(held.failures), first=reason)
            held.batch.ack()
        return [Batch(held.batch.source, records, held.batch.origin)]

    def _scored_records(self, held: _Held) -> pa.RecordBatch:
        records = held.batch.records
        at = records.schema.get_field_index(ERROR)
        if at < 0:
            errors = error_column(pa.nulls(records.num_rows, pa.string()), held.failures)
            records = records.append_column(ERROR, errors)
        elif held.failures:
            records = records.set_column(at, ERROR, error_column(records.column(at), held.failures))
        return self._written(records, _in_order(held, self._scorer.output))

    def _written(self, records: pa.RecordBatch, scores: pa.Array) -> pa.RecordBatch:
        """The rows with what the function said of each; null where it was not asked, or failed."""
        return records.append_column(self._scorer.name, scores)


def _in_order(held: _Held, output: pa.DataType) -> pa.Array:
    """What was said of each row of a batch; null where nothing was."""
    count = len(held.group_of_row)
    if not held.scores:
        return pa.nulls(count, output)
    rows = np.concatenate(held.scored)
    if len(held.scores) == 1 and np.array_equal(rows, np.arange(count)):
        return held.scores[0]
    at = np.full(count, -1)
    at[rows] = np.arange(len(rows))
    return pa.concat_arrays(held.scores).take(pa.array(at, mask=at < 0))


def _groups(records: pa.RecordBatch) -> AnyArray:
    """Number of each row's group within the batch, int [rows]; each row its own without group_id."""
    at = records.schema.get_field_index(GROUP_ID)
    if at < 0 or not records.num_rows:
        return np.arange(records.num_rows)
    ids = records.column(at).to_numpy()
    return np.concatenate([[0], np.cumsum(ids[1:] != ids[:-1])])


def _is_good(records: pa.RecordBatch) -> AnyArray:
    good = np.ones(records.num_rows, bool)
    for name in (ERROR, DROP_REASON):
        at = records.schema.get_field_index(name)
        if at >= 0 and records.column(at).null_count < records.num_rows:
            good &= records.column(at).is_null().to_numpy(zero_copy_only=False)
    return good
