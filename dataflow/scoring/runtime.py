"""The runtime of a scorer: rows in, the same rows with one more column out, their failures recorded."""

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from dataflow.errors import RecordError
from dataflow.records import DROP_REASON, ERROR, GROUP_ID, AnyArray
from dataflow.runtime import Batch, Context, Runtime
from dataflow.scoring.calls import Call, Settings
from dataflow.scoring.knobs import ScorerKnobs
from dataflow.scoring.pool import Answer, Pool
from dataflow.scoring.values import (
    checker,
    describe,
    error_column,
    group_argument,
    group_values,
    row_arguments,
    score_column,
)

_ROOM = 2048
_HOLD_S = 0.05
_COUNT = struct.Struct("<I")


def build(scorer: ScorerKnobs[..., Any], context: Context) -> "Scoring":
    """The runtime of a scorer; forks its pool's server where it is isolated."""
    return Scoring(scorer, context, caller_of(scorer))


def caller_of(scorer: ScorerKnobs[..., Any]) -> "Caller":
    """What makes the calls of a scorer: a pool, whose server is forked here, or this process."""
    code = scorer.function.__code__
    settings = Settings(
        prepare=partial(_prepare, scorer),
        describe=partial(describe, code=code),
        processes=scorer.processes,
        concurrency=scorer.concurrency,
        is_async=scorer.signature.is_async,
        timeout_s=scorer.timeout_s,
        memory_mb=scorer.memory_mb,
    )
    return Pool(settings) if scorer.isolate else InWorker(settings)


class Caller(Protocol):
    """What makes the calls: `Pool`, or `InWorker`."""

    @property
    def open_calls(self) -> int:
        """Calls submitted and not yet answered."""

    def submit(self, calls: int, encode: Callable[[int, int], bytes]) -> int:
        """Take a job; its number."""

    def poll(self) -> list[Answer]:
        """The answers that have come."""

    def close(self) -> None:
        """Give back what it holds."""


class InWorker:
    """Makes the calls of one job at a time in this process, with no limits."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._jobs: deque[tuple[int, int, Callable[[int, int], bytes]]] = deque()
        self._next_job = 0

    @property
    def open_calls(self) -> int:
        """Calls submitted and not yet answered."""
        return sum(calls for _, calls, _ in self._jobs)

    def submit(self, calls: int, encode: Callable[[int, int], bytes]) -> int:
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
                values.append(None)
                failures[index] = self._settings.describe(error)
        return [Answer(job, list(range(calls)), values, failures)]

    def close(self) -> None:
        """Forget what has not been called."""
        self._jobs.clear()


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
    values: list[Any]
    since: float
    """When something was last sent of it, in seconds."""
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
        return (self._caller.fileno(),) if isinstance(self._caller, Pool) and self._caller.open_calls else ()

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
            values=[None] * records.num_rows,
            since=self._clock(),
        )
        self._rows += records.num_rows
        if len(good):
            calls = len(starts) - 1
            self._held[self._caller.submit(calls, partial(_encode, rows, starts, self._scorer.per))] = held
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

    def status(self) -> dict[str, float | int | str]:
        """Rows waiting, scored and failed, and how often a process was replaced."""
        restarts = self._caller.restarts if isinstance(self._caller, Pool) else 0
        return {
            "queue": self._rows,
            "scored": self._scored,
            "failed": self._failed,
            "restarts": restarts,
        }

    def close(self) -> None:
        """End its processes."""
        self._caller.close()

    def _take(self, answer: Answer) -> None:
        held = self._held[answer.job]
        first_rows = held.good[held.starts[answer.calls]]
        if self._scorer.per == "row":
            for row, value in zip(first_rows.tolist(), answer.values, strict=True):
                held.values[row] = value
        else:
            for call, value in zip(answer.calls, answer.values, strict=True):
                if call not in answer.failures:
                    self._take_group(held, call, *value)
        for call, text in answer.failures.items():
            self._fail(held, held.good[held.starts[call] : held.starts[call + 1]], text)
        np.subtract.at(held.calls_left, held.group_of_row[first_rows], 1)
        if not held.calls_left.any():
            del self._held[answer.job]
            self._done.append(held)

    def _take_group(self, held: _Held, call: int, values: list[Any], failures: dict[int, str]) -> None:
        rows = held.good[held.starts[call] : held.starts[call + 1]]
        for row, value in zip(rows.tolist(), values, strict=True):
            held.values[row] = value
        for at, text in failures.items():
            self._fail(held, rows[at : at + 1], text)

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
        return self._written(records, held.values)

    def _written(self, records: pa.RecordBatch, values: list[Any]) -> pa.RecordBatch:
        """The rows with what the function said of each; None where it was not asked, or failed."""
        return records.append_column(self._scorer.name, score_column(values, self._scorer.output))


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


def _encode(rows: pa.RecordBatch, starts: AnyArray, per: str, start: int, stop: int) -> bytes:
    """Calls start to stop: the number of rows of each group (none when called per row), then Arrow IPC."""
    sizes = np.diff(starts[start : stop + 1]).astype(np.int32) if per == "group" else np.empty(0, np.int32)
    first, last = int(starts[start]), int(starts[stop])
    sink = pa.BufferOutputStream()
    sink.write(_COUNT.pack(len(sizes)) + sizes.tobytes())
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows.slice(first, last - first))
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _prepare(scorer: ScorerKnobs[..., Any], payload: bytes) -> Call:
    """The function that makes call number i of a payload."""
    (count,) = _COUNT.unpack_from(payload)
    head = _COUNT.size + 4 * count
    sizes = np.frombuffer(payload, np.int32, count, _COUNT.size)
    rows = pa.ipc.open_stream(pa.py_buffer(memoryview(payload)[head:])).read_next_batch()
    if scorer.per == "row":
        return _row_call(scorer, rows)
    return _group_call(scorer, rows, np.concatenate([[0], np.cumsum(sizes)]))


def _row_call(scorer: ScorerKnobs[..., Any], rows: pa.RecordBatch) -> Call:
    function, given, check = scorer.function, dict(scorer.given), checker(scorer.output)
    names = rows.schema.names
    columns = [row_arguments(rows.column(name), scorer.signature.annotations[name]) for name in names]

    def arguments(index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in zip(names, columns, strict=True)}

    if scorer.signature.is_async:

        async def call_async(index: int) -> Any:
            return check(await function(**arguments(index), **given))

        return call_async
    return lambda index: check(function(**arguments(index), **given))


def _group_call(scorer: ScorerKnobs[..., Any], rows: pa.RecordBatch, starts: AnyArray) -> Call:
    function, given, check = scorer.function, dict(scorer.given), checker(scorer.output)
    annotations = scorer.signature.annotations

    def arguments(index: int) -> dict[str, Any]:
        size = int(starts[index + 1] - starts[index])
        group = rows.slice(int(starts[index]), size)
        return {name: group_argument(group.column(name), annotations[name]) for name in annotations}

    def values(index: int, returned: Any) -> Any:
        size = int(starts[index + 1] - starts[index])
        return group_values(returned, size, check, scorer.signature.is_broadcast)

    if scorer.signature.is_async:

        async def call_async(index: int) -> Any:
            return values(index, await function(**arguments(index), **given))

        return call_async
    return lambda index: values(index, function(**arguments(index), **given))
