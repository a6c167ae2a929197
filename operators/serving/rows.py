"""The rollout rows of calls, as Arrow: the columns of any rollout, who asked for it, and the
stream that they are appended to."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from dataflow import records
from dataflow.errors import RunError
from dataflow.records import GROUP_ID, ROLLOUT_ID, Columns, schema
from dataflow.system.files import disk
from dataflow.tokens.rollout_tokens import RolloutTokens

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


@dataclass(frozen=True, kw_only=True)
class CallGroup:
    """What the rollouts of one prompt of one call have in common."""

    group_id: int
    size: int
    prompt: str
    """Text, or chat messages as JSON."""
    prompt_tokens: Sequence[int]
    session: str | None
    request_id: str
    created_ms: int
    """Since 1970, UTC."""
    model: str
    parent: int | None
    reused: int
    seeds: Sequence[int]
    parameters: dict[str, Any]

    def rollout_id(self, position: int) -> int:
        """Of the rollout at this position, as in every run folder."""
        return self.group_id * self.size + position


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What the model wrote in one of them."""

    text: str
    tokens: RolloutTokens
    finish_reason: str
    """stop, length or error."""
    error: str | None = None


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


def rows_of(group: CallGroup, completions: Sequence[Completion]) -> pa.RecordBatch:
    """One row for each rollout of the group, with COLUMNS."""
    size, prompt = group.size, RolloutTokens.given(np.array(group.prompt_tokens))
    rollouts = [RolloutTokens.joined([prompt, completion.tokens]) for completion in completions]
    offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens in rollouts])])
    columns: dict[str, Any] = RolloutTokens.joined(rollouts).columns(offsets) | {
        records.GROUP_ID: [group.group_id] * size,
        records.PROMPT_ID: [prompt_id(group.prompt)] * size,
        records.PROMPT: [group.prompt] * size,
        records.GROUP_SIZE: [size] * size,
        records.MIN_VERSION: [0] * size,
        records.ROUND_SIZE: [0] * size,
        records.ROLLOUT_ID: [group.rollout_id(position) for position in range(size)],
        records.POSITION: list(range(size)),
        records.COMPLETION: [completion.text for completion in completions],
        records.FINISH_REASON: [completion.finish_reason for completion in completions],
        records.ERROR: [completion.error for completion in completions],
        SESSION_ID: [group.session] * size,
        REQUEST_ID: [group.request_id] * size,
        CREATED: [group.created_ms] * size,
        MODEL: [group.model] * size,
        PARENT_ROLLOUT_ID: [group.parent] * size,
        REUSED_TOKENS: [group.reused] * size,
        SEED: list(group.seeds),
        PARAMETERS: [json.dumps(group.parameters, ensure_ascii=False)] * size,
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
