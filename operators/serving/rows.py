"""The rollout rows of calls, as Arrow: the columns of any rollout, who asked for it, the stream
that they are appended to, and whole conversations made of them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from dataflow import records
from dataflow.errors import RecordError, RunError
from dataflow.records import ERROR, GROUP_ID, ROLLOUT_ID, Columns, schema
from dataflow.system.files import disk
from dataflow.tokens.rollout_tokens import RolloutTokens

if TYPE_CHECKING:
    from operators.serving.calls import CallPrompt, ServedCall

SESSION_ID = "session_id"
REQUEST_ID = "request_id"
CREATED = "created"
MODEL = "model"
PARENT_ROLLOUT_ID = "parent_rollout_id"
REUSED_TOKENS = "reused_tokens"
SEED = "seed"
PARAMETERS = "parameters"

SERVING_COLUMNS: Columns = {
    SESSION_ID: pa.string(),  # header X-Session-Id, or the field user; null where neither was sent
    # the `id` of the answer; `position` is the choice's index within its prompt
    REQUEST_ID: pa.string(),
    CREATED: pa.timestamp("ms", tz="UTC"),  # when the call arrived
    MODEL: pa.string(),  # the name it was called by
    # the rollout whose tokens this one's prompt begins with, or null
    PARENT_ROLLOUT_ID: pa.int64(),
    REUSED_TOKENS: pa.int32(),  # how many of the first tokens are the parent's own
    SEED: pa.int64(),  # of the rollout
    PARAMETERS: pa.string(),  # JSON: what was asked for beside the prompt, with the defaults
}

COLUMNS: Columns = {**records.PROMPT_COLUMNS, **records.ROLLOUT_COLUMNS, **SERVING_COLUMNS}


class GroupIds:
    """Hands out group ids so that `group_id * size + position` names one rollout only, whatever the
    sizes.
    """

    def __init__(self, group: int = 0, rollout: int = 0) -> None:
        """Begin after what is taken: the lowest free group id and rollout id."""
        self._group, self._rollout = group, rollout

    def take(self, size: int) -> int:
        """The id of a new group of so many rollouts."""
        group = max(self._group, -(-self._rollout // size))
        self._group, self._rollout = group + 1, (group + 1) * size
        return group


def rows_of(call: ServedCall, part: CallPrompt) -> pa.RecordBatch:
    """One row for each rollout of a prompt, with COLUMNS."""
    choices, prompt, request = part.choices, part.prompt, call.request
    size, given = len(choices), RolloutTokens.given(np.array(prompt.tokens))
    rollouts = [RolloutTokens.joined([given, choice.tokens]) for choice in choices]
    offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens in rollouts])])
    reasons = [choice.finish_reason or "error" for choice in choices]
    shared = {
        records.GROUP_ID: part.group_id,
        records.PROMPT_ID: prompt_id(prompt.shown),
        records.PROMPT: prompt.shown,
        records.GROUP_SIZE: size,
        records.MIN_VERSION: 0,
        records.ROUND_SIZE: 0,
        SESSION_ID: call.session,
        REQUEST_ID: call.request_id,
        CREATED: call.created_ms,
        MODEL: request.model,
        PARENT_ROLLOUT_ID: prompt.parent,
        REUSED_TOKENS: prompt.reused,
        PARAMETERS: json.dumps(request.parameters, ensure_ascii=False),
    }
    columns: dict[str, Any] = {
        **{name: [value] * size for name, value in shared.items()},
        **RolloutTokens.joined(rollouts).columns(offsets),
        records.ROLLOUT_ID: [part.rollout_id(position) for position in range(size)],
        records.POSITION: list(range(size)),
        records.COMPLETION: [choice.transcript.text for choice in choices],
        records.FINISH_REASON: ["stop" if why == "tool_calls" else why for why in reasons],
        records.ERROR: [choice.error for choice in choices],
        SEED: list(part.seeds),
    }
    return pa.record_batch(
        [pa.array(columns[name], kind) for name, kind in COLUMNS.items()], records.schema(COLUMNS)
    )


def prompt_id(prompt: str) -> str:
    """The same for the same prompt."""
    return xxhash.xxh3_64_hexdigest(prompt.encode())


class RolloutLog:
    """An Arrow IPC stream of rows with COLUMNS, one batch for each prompt of a call; one process
    writes it.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` to append to; what a crash left of a torn batch is cut off.

        Raises:
            RunError: another process writes it, or it holds something else.
            RunFolderError: the disk says no.
        """
        self.path = path
        with disk("opening", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
            self.numbers, end = self._read()
            with disk("cutting a torn batch off", path):
                os.ftruncate(self._handle, end)
                os.lseek(self._handle, end, os.SEEK_SET)
            if not end:
                self._write(schema(COLUMNS).serialize())
        except BaseException:
            os.close(self._handle)
            raise

    def append(self, rows: pa.RecordBatch) -> None:
        """Write a batch, in one piece; it is the operating system's when this returns. Errors:
        RunFolderError.
        """
        self._write(rows.serialize())

    def close(self) -> None:
        """Close the file; readable as it is."""
        os.close(self._handle)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be appended to; found another process writing it; name another"
                " file"
            ) from error

    def _read(self) -> tuple[GroupIds, int]:
        """The numbers that are free, and where the last whole batch ends."""
        group = rollout = -1
        end = 0
        if os.fstat(self._handle).st_size:
            with pa.OSFile(str(self.path)) as source:
                for batch, end in _batches(source, self.path):  # noqa: B007
                    if batch is not None and batch.num_rows:
                        group = max(group, pc.max(batch.column(GROUP_ID)).as_py())
                        rollout = max(rollout, pc.max(batch.column(ROLLOUT_ID)).as_py())
        return GroupIds(group + 1, rollout + 1), end

    def _write(self, piece: pa.Buffer) -> None:
        end = os.lseek(self._handle, 0, os.SEEK_CUR)
        unwritten = memoryview(piece)
        with disk("appending to", self.path):
            try:
                while unwritten:
                    unwritten = unwritten[os.write(self._handle, unwritten) :]
            except OSError:
                os.ftruncate(self._handle, end)
                os.lseek(self._handle, end, os.SEEK_SET)
                raise


def read_rollouts(path: str | Path) -> pa.Table:
    """All whole batches of a file of rollouts, also while it is written or after a crash.

    Raises:
        RunError: it is no such file.
    """
    with disk("reading", Path(path)), pa.OSFile(str(path)) as source:
        batches = [batch for batch, _ in _batches(source, Path(path)) if batch is not None]
    return pa.Table.from_batches(batches, schema(COLUMNS))


def _batches(source: pa.NativeFile, path: Path) -> Iterator[tuple[pa.RecordBatch | None, int]]:
    """Each whole batch and where it ends; first None and where the schema ends."""
    expected = schema(COLUMNS)
    messages = pa.ipc.MessageReader.open_stream(source)
    try:
        actual = pa.ipc.read_schema(messages.read_next_message())
    except (StopIteration, OSError, pa.ArrowInvalid) as error:
        raise RunError(
            f"{path} is no stream of rollouts; found no Arrow schema in it; name another file"
        ) from error
    if not actual.equals(expected):
        raise RunError(
            f"{path} has other columns; found {actual.names}, not {expected.names}; name another"
            " file"
        )
    yield None, source.tell()
    while True:
        try:
            message = messages.read_next_message()
        except (StopIteration, OSError, pa.ArrowInvalid):
            return
        yield pa.ipc.read_record_batch(message, expected), source.tell()


def conversations(rows: pa.Table) -> pa.Table:
    """One row for each call that no other goes on from, with what the model wrote in the calls
    before it.

    Its tokens are the call's own, which begin with those of its parent; mask, logprobs and versions
    of that beginning are the parent's, and so on back. Where several calls go on from one, the
    first has what was written before them, so that every token is chosen once. A call that failed
    is passed over, as are the tokens of parents that `rows` lacks. Columns as in `COLUMNS`.

    Raises:
        RecordError: tokens that should be the parent's are not.
    """
    good = rows.filter(rows.column(ERROR).is_null()).combine_chunks()
    if not good.num_rows:
        return pa.Table.from_pylist([], schema(COLUMNS))
    tokens, offsets = RolloutTokens.of_rows(good)
    names = (ROLLOUT_ID, PARENT_ROLLOUT_ID, REUSED_TOKENS)
    numbers, parents, reused = (good.column(name).to_pylist() for name in names)
    calls = {
        number: _Call(parents[at], reused[at], tokens[offsets[at] : offsets[at + 1]])
        for at, number in enumerate(numbers)
    }
    continued, used = {call.parent for call in calls.values()}, set[int]()
    ends = [at for at, number in enumerate(numbers) if number not in continued]
    merged = [_merged(numbers[at], calls, used) for at in ends]
    columns = RolloutTokens.joined(merged).columns(
        np.r_[0, np.cumsum([len(tokens) for tokens in merged])]
    )
    leaves = good.take(pa.array(ends, pa.int64()))
    return pa.table(
        {name: columns.get(name, leaves.column(name)) for name in COLUMNS}, schema(COLUMNS)
    )


@dataclass(frozen=True)
class _Call:
    """A call's row: its tokens."""

    parent: int | None
    reused: int
    """Tokens that are its parent's."""
    tokens: RolloutTokens


def _merged(number: int, calls: Mapping[int, _Call], used: set[int]) -> RolloutTokens:
    """The tokens of a call, with what was chosen in those before it."""
    own = call = calls[number]
    mask, logprobs, versions = (
        own.tokens.mask.copy(),
        own.tokens.logprobs.copy(),
        own.tokens.versions.copy(),
    )
    at, shared = number, len(own.tokens)
    while at not in used:
        used.add(at)
        if call.parent is None or call.parent not in calls:
            break
        shared = min(shared, call.reused)
        at, call = call.parent, calls[call.parent]
        before = call.tokens[:shared]
        if not np.array_equal(before.ids, own.tokens.ids[:shared]):
            raise RecordError(
                f"rollout {number} should begin with {shared} tokens of rollout {at}; found others;"
                " give the rows of one file"
            )
        if at not in used:
            chosen = np.flatnonzero(before.mask)
            mask[chosen], logprobs[chosen], versions[chosen] = (
                True,
                before.logprobs[chosen],
                before.versions[chosen],
            )
    return RolloutTokens(own.tokens.ids, mask, logprobs, versions)
