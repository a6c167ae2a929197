"""The runtime of a scorer, and of a filter: rows come in, and leave with one more column; failures
are recorded.

A call goes `_submit`, `Pool.submit`, `server.make_calls` (in a process of the pool), the user's
function. Its answer comes back by `Pool.poll`, `_take`, `_fail`, `_scored_records`.
"""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow.errors import RecordError
from dataflow.records import (
    DROP_REASON,
    ERROR,
    GROUP_ID,
    PROMPT_COLUMNS,
    ROLLOUT_COLUMNS,
    AnyArray,
    note_column,
)
from dataflow.runtime import Batch, Context, Runtime
from dataflow.scoring.calls import PoolSettings
from dataflow.scoring.failure import DIED, HUNG, RAISED, RolloutFailure, status_of
from dataflow.scoring.pool import Answer, Encode, Pool
from dataflow.scoring.signature import NOTED, Signature, code_of
from dataflow.scoring.values import (
    WORLD_ERRORS,
    describe,
    encode,
    error_column,
    pack,
    prepare,
    unpack,
)
from dataflow.tokens.ragged import gather

if TYPE_CHECKING:
    from dataflow.scorer import Scorer


class InWorker:
    """Makes the calls of one job at a time in this process, with no limits."""

    restarts = 0
    at_work = 0.0

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._jobs: deque[tuple[int, int, Encode]] = deque()
        self._next_job = 0

    @property
    def open_calls(self) -> int:
        """Calls submitted and not yet answered."""
        return sum(calls for _, calls, _ in self._jobs)

    def waits(self) -> Sequence[int]:
        """None: `poll` makes the calls itself."""
        return ()

    def submit(self, calls: int, encode: Encode) -> int:
        """Take a job; its number."""
        self._jobs.append((self._next_job, calls, encode))
        self._next_job += 1
        return self._next_job - 1

    def poll(self) -> list[Answer]:
        """Make the calls of the oldest job."""
        if not self._jobs:
            return []
        job, calls, encode = self._jobs.popleft()
        call = self._settings.prepare(encode(0, calls))
        values: list[Any] = []
        failures: dict[int, str] = {}
        for index in range(calls):
            try:
                values.append(call(index))
            except (Exception, SystemExit) as error:
                failures[index] = self._settings.describe(error)
        return [Answer(job, list(range(calls)), failures, self._settings.pack(values))]

    def close(self) -> None:
        """Drop the calls that were not made."""
        self._jobs.clear()


def caller_of(scorer: "Scorer[..., Any]") -> Pool | InWorker:
    """The caller of a scorer: a pool, whose server is forked here, or this process.

    Both make calls by `prepare` and describe their exceptions by `describe`: in a pool's processes
    `server.make_calls` does so.
    """
    code = code_of(scorer.function) or scorer.function.__code__
    settings = PoolSettings(
        prepare=partial(prepare, scorer),
        pack=partial(pack, scorer),
        describe=partial(describe, code=code, world=(*WORLD_ERRORS, *scorer.world)),
        processes=scorer.processes,
        concurrency=scorer.concurrency,
        is_async=scorer.signature.is_async,
        timeout_s=scorer.timeout_s,
        memory_mb=scorer.memory_mb,
    )
    return Pool(settings) if scorer.isolate else InWorker(settings)


# The runtime of a scorer, and that of a filter.

_ROOM = 2048
_HOLD_S = 0.05


@dataclass(eq=False)
class _HeldBatch:
    """A batch whose rows are being scored."""

    batch: Batch
    group_of_row: AnyArray
    """Number of the row's group within the batch, int [rows]."""
    calls_left: AnyArray
    """Unanswered calls of each group, int [groups]; one for several groups counts for each of
    them."""
    since: float
    """When its groups last left, in seconds."""
    scores: list[pa.Array] = field(default_factory=list)
    """Scores of its rows so far."""
    scored: list[AnyArray] = field(default_factory=list)
    """The rows of these scores, int [rows of each]."""
    failures: dict[int, str] = field(default_factory=dict)
    is_sent: AnyArray = field(init=False)
    """Which groups have left, bool [groups]."""

    def __post_init__(self) -> None:
        self.is_sent = np.zeros(len(self.calls_left), bool)


@dataclass
class _Job:
    """Calls that are being made for rows of a batch."""

    batch: _HeldBatch
    rows: AnyArray
    """Rows of the batch, call by call, int [rows]."""
    starts: AnyArray
    """Where the rows of each call begin, int [calls + 1]."""
    calls_left: int
    """Calls without an answer."""

    def rows_of(self, call: int) -> AnyArray:
        """The rows of a call."""
        return self.rows[self.starts[call] : self.starts[call + 1]]


class Scoring(Runtime):
    """Scores rows that have no error, were not dropped and have what it reads, and passes every row
    on.

    A call for several groups that raises, hangs or ends its process is made again group by group,
    and the log says so; what a function gives to a part of a group is not what it gives to the
    group. A call that gives no usable answer (a wrong number of values), or whose world failed, is
    not made again.

    consumes: batches, up to about 2,000 rows at a time
    produces: their groups, each once and whole, in the order in which they are ready
    waits for: the processes of its pool
    unblocked by: their answers, or the limits of time and memory
    """

    def __init__(
        self,
        scorer: "Scorer[..., Any]",
        context: Context,
        caller: Pool | InWorker | None = None,
    ) -> None:
        """caller: what makes the calls; None: the scorer's own, whose server is forked here."""
        self._scorer = scorer
        self._clock = context.clock
        self._log = context.log
        self._caller = caller or caller_of(scorer)
        self._room = max(_ROOM, 4 * scorer.processes * scorer.concurrency)
        self._jobs: dict[int, _Job] = {}
        self._held: list[_HeldBatch] = []
        self._done: list[_HeldBatch] = []
        self._rows = self._scored = self._not_applying = 0
        self._causes: Counter[str] = Counter()
        """Rows that failed, by cause."""

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
                f"'{self._scorer.name}' reads column '{missing[0]}', its rows have"
                f" {records.schema.names}; add it to Prompts(columns=...) or apply the operator"
                " that writes it first"
            )
        group_of_row = _groups(records)
        good = np.flatnonzero(
            _is_good(records) & _has_values(records, reads, self._scorer.signature.takes_none)
        )
        groups = int(group_of_row[-1]) + 1 if len(group_of_row) else 0
        rows_left = np.bincount(group_of_row[good], minlength=groups)
        if self._scorer.per == "row":
            starts = np.arange(len(good) + 1)
        elif self._scorer.per == "group":
            starts = np.concatenate([[0], np.cumsum(rows_left[rows_left > 0])]).astype(np.int64)
        else:
            starts = np.array([0, len(good)] if len(good) else [0])
        held_batch = _HeldBatch(
            batch=batch,
            group_of_row=group_of_row,
            calls_left=rows_left if self._scorer.per == "row" else (rows_left > 0).astype(np.int64),
            since=self._clock(),
        )
        self._rows += records.num_rows
        if len(good):
            self._held.append(held_batch)
            self._submit(held_batch, good, starts)
        else:
            self._done.append(held_batch)

    def work(self) -> list[Batch] | None:
        """The groups that are ready now."""
        for answer in self._caller.poll():
            self._take(answer)
        ready: list[Batch] = []
        for held_batch in self._done:
            ready += self._leave(held_batch, is_last=True)
        self._done.clear()
        now = self._clock()
        for held_batch in self._held:
            if now - held_batch.since > _HOLD_S:
                held_batch.since = now
                ready += self._leave(held_batch, is_last=False)
        return ready or None

    def beside(self) -> float:
        """The share of its pool that makes calls."""
        return self._caller.at_work

    def status(self) -> dict[str, float | int | str]:
        """Rows waiting, passed on, failed, and not applicable; how often a process was replaced."""
        return {
            "queue": self._rows,
            "scored": self._scored,
            **status_of(self._causes),
            "does_not_apply": self._not_applying,
            "restarts": self._caller.restarts,
        }

    def close(self) -> None:
        """End its processes."""
        self._caller.close()

    def _submit(self, held_batch: _HeldBatch, rows: AnyArray, starts: AnyArray) -> None:
        """Have calls made for these rows of a batch."""
        records, signature = held_batch.batch.records, self._scorer.signature
        names = [*signature.reads, *(_rest(records, signature) if self._scorer.rest else ())]
        columns = records.select(names)
        columns = columns if len(rows) == records.num_rows else columns.take(pa.array(rows))
        calls = len(starts) - 1
        number = self._caller.submit(calls, partial(encode, columns, starts, self._scorer.per))
        self._jobs[number] = _Job(held_batch, rows, starts, calls)

    def _take(self, answer: Answer) -> None:
        """Keep the scores of some calls; what failed goes to `_fail`, or is called again."""
        job = self._jobs[answer.job]
        held_batch = job.batch
        answered = [call for call in answer.calls if call not in answer.failures]
        if answered:
            rows = job.rows[
                answered if self._scorer.per == "row" else gather(job.starts, np.array(answered))[0]
            ]
            scores, failures = unpack(self._scorer, answer.body)
            assert len(scores) == len(rows), "one for each"
            held_batch.scores.append(scores)
            held_batch.scored.append(rows)
            values = scores.field(0) if scores.type == NOTED else scores
            self._not_applying += values.null_count - len(failures)
            for at, text in failures.items():
                self._fail(held_batch, rows[at : at + 1], text)
        again: list[AnyArray] = []
        for call, text in answer.failures.items():
            rows = job.rows_of(call)
            groups = np.unique(held_batch.group_of_row[rows])
            if (
                self._scorer.per == "batch"
                and len(groups) > 1
                and text.partition(": ")[0] in (RAISED, HUNG, DIED)
            ):
                again.append(rows)
                held_batch.calls_left[groups] += 1
            else:
                self._fail(held_batch, rows, text)
        if self._scorer.per == "batch":
            for call in answer.calls:
                held_batch.calls_left[np.unique(held_batch.group_of_row[job.rows_of(call)])] -= 1
        else:
            np.subtract.at(
                held_batch.calls_left,
                held_batch.group_of_row[job.rows[job.starts[answer.calls]]],
                1,
            )
        job.calls_left -= len(answer.calls)
        if not job.calls_left:
            del self._jobs[answer.job]
        for rows in again:
            firsts = np.flatnonzero(np.diff(held_batch.group_of_row[rows], prepend=-1))
            self._log.warning(
                "a call for several groups failed; it is made again for each group",
                groups=len(firsts),
                rows=len(rows),
                first=next(iter(answer.failures.values())),
            )
            self._submit(held_batch, rows, np.append(firsts, len(rows)))
        if not held_batch.calls_left.any():
            self._held.remove(held_batch)
            self._done.append(held_batch)

    def _fail(self, held_batch: _HeldBatch, rows: AnyArray, text: str) -> None:
        """Keep the error of some rows, which `_scored_records` writes into their column `error`."""
        for row in rows.tolist():
            held_batch.failures[row] = f"{self._scorer.name}: {text}"
        self._causes[RolloutFailure.read(f"{self._scorer.name}: {text}").cause] += len(rows)

    def _leave(self, held_batch: _HeldBatch, is_last: bool) -> list[Batch]:
        """The groups of a batch that are ready and have not left; the last of them acknowledge
        it.
        """
        leaves = (held_batch.calls_left == 0) & ~held_batch.is_sent
        if not is_last and not leaves.any():
            return []
        held_batch.is_sent |= leaves
        records = self._scored_records(held_batch)
        if not leaves.all():
            records = records.filter(pa.array(leaves[held_batch.group_of_row]))
        self._rows -= records.num_rows
        self._scored += records.num_rows
        if is_last:
            if held_batch.failures:
                reason = next(iter(held_batch.failures.values()))
                self._log.warning(
                    "rows without a score", rows=len(held_batch.failures), first=reason
                )
            held_batch.batch.ack()
        return [Batch(held_batch.batch.source, records, held_batch.batch.origin)]

    def _scored_records(self, held_batch: _HeldBatch) -> pa.RecordBatch:
        records = held_batch.batch.records
        at = records.schema.get_field_index(ERROR)
        if at < 0:
            errors = error_column(pa.nulls(records.num_rows, pa.string()), held_batch.failures)
            records = records.append_column(ERROR, errors)
        elif held_batch.failures:
            records = records.set_column(
                at, ERROR, error_column(records.column(at), held_batch.failures)
            )
        return self._written(records, _in_order(held_batch, self._scorer.output))

    def _written(self, records: pa.RecordBatch, scores: pa.Array) -> pa.RecordBatch:
        """The rows with their scores; null where it does not apply, was not asked, or failed."""
        if scores.type != NOTED:
            return records.append_column(self._scorer.name, scores)
        values, notes = scores.flatten()
        records = records.append_column(self._scorer.name, values)
        return records.append_column(note_column(self._scorer.name), notes)


def _in_order(held_batch: _HeldBatch, output: pa.DataType) -> pa.Array:
    """The score of each row of a batch; null where there is none."""
    count = len(held_batch.group_of_row)
    if not held_batch.scores:
        return pa.nulls(count, output)
    rows = np.concatenate(held_batch.scored)
    if len(held_batch.scores) == 1 and np.array_equal(rows, np.arange(count)):
        return held_batch.scores[0]
    at = np.full(count, -1)
    at[rows] = np.arange(len(rows))
    return pa.concat_arrays(held_batch.scores).take(pa.array(at, mask=at < 0))


def _groups(records: pa.RecordBatch) -> AnyArray:
    """Number of each row's group within the batch, int [rows]; each row its own without
    group_id.
    """
    at = records.schema.get_field_index(GROUP_ID)
    if at < 0 or not records.num_rows:
        return np.arange(records.num_rows)
    ids = records.column(at).to_numpy()
    return np.concatenate([[0], np.cumsum(ids[1:] != ids[:-1])])


def _has_values(
    records: pa.RecordBatch, reads: Sequence[str], takes_none: Collection[str]
) -> AnyArray:
    """Which rows have a value in each column that must have one, bool [rows]."""
    has = np.ones(records.num_rows, bool)
    for name in reads:
        if (
            name not in takes_none
            and name not in (ERROR, DROP_REASON)
            and records.column(name).null_count
        ):
            has &= records.column(name).is_valid().to_numpy(zero_copy_only=False)
    return has


def _rest(records: pa.RecordBatch, signature: Signature) -> list[str]:
    """The columns that are neither the engine's nor read or set by name."""
    taken_names = {
        *PROMPT_COLUMNS,
        *ROLLOUT_COLUMNS,
        DROP_REASON,
        *signature.reads,
        *signature.defaults,
    }
    return [name for name in records.schema.names if name not in taken_names]


def _is_good(records: pa.RecordBatch) -> AnyArray:
    good = np.ones(records.num_rows, bool)
    for name in (ERROR, DROP_REASON):
        at = records.schema.get_field_index(name)
        if at >= 0 and records.column(at).null_count < records.num_rows:
            good &= records.column(at).is_null().to_numpy(zero_copy_only=False)
    return good


class Filtering(Scoring):
    """Passes every group on, with `drop_reason` set on those that its function dropped.

    consumes, produces, waits for, unblocked by: as Scoring. Rows are not made smaller: a dropped
    group's next stop is the trainer, and it must fit the same schema there.
    """

    def _written(self, records: pa.RecordBatch, scores: pa.Array) -> pa.RecordBatch:
        is_dropped = pc.fill_null(pc.invert(scores), False)
        reasons = pc.if_else(is_dropped, self._scorer.name, pa.scalar(None, pa.string()))
        at = records.schema.get_field_index(DROP_REASON)
        if at < 0:
            return records.append_column(DROP_REASON, reasons)
        return records.set_column(at, DROP_REASON, pc.coalesce(records.column(at), reasons))
