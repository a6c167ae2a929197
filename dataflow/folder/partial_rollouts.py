"""What unfinished rollouts have drawn, in Arrow files of the run folder: a crash costs a long rollout its last tokens.

A generator's process appends what rollouts have grown by now and then, and lets go of a group when it has an outcome:
files <node>/<replica>-<attempt>-<number>.<source>.parts (dataflow.folder.arrow_log) beside the finished ones. The rows
that one process wrote of a rollout are a line; lines are never joined with one another, as other weights may have
drawn them.
"""

import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.folder.arrow_log import FILE_BYTES, ArrowLog
from dataflow.records import (
    COMPLETION,
    FINISH_REASON,
    GROUP_ID,
    LOGPROBS,
    POSITION,
    SAMPLING_MASK,
    SAMPLING_MASK_TYPE,
    TOKENS,
    VERSIONS,
)
from dataflow.rollout_tokens import RolloutTokens, SamplingMask

MARK, BEGIN, LINE = "mark", "begin", "line"

SCHEMA = pa.schema(
    [
        (GROUP_ID, pa.int64()),
        (POSITION, pa.int32()),
        (MARK, pa.int64()),  # of the prompt's tokens and the seed
        (BEGIN, pa.int32()),  # tokens of the completion before these
        (TOKENS, pa.list_(pa.int32())),
        (LOGPROBS, pa.list_(pa.float32())),
        (VERSIONS, pa.list_(pa.int32())),
        (SAMPLING_MASK, SAMPLING_MASK_TYPE),  # null where none is recorded
        (FINISH_REASON, pa.string()),  # null while the rollout goes on
        (COMPLETION, pa.string()),  # null where it is simply its tokens
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRollout:
    """Some tokens of a completion, as they were drawn."""

    begin: int
    """Tokens of the completion before them."""
    tokens: RolloutTokens
    finish_reason: str | None = None
    """Why the rollout ended with them; None while it goes on."""
    text: str | None = None
    """Of an ended rollout, the completion, where it is not simply its tokens."""

    @property
    def end(self) -> int:
        """Tokens of the completion up to the last of them."""
        return self.begin + len(self.tokens)


@dataclass(frozen=True, slots=True)
class PartialRow:
    """A partial rollout, and whose it is."""

    group: int
    position: int
    mark: int
    """Checksum of what a rollout depends on beside the weights: its prompt's tokens and the seed. int64."""
    rollout: PartialRollout


class PartialRolloutFiles:
    """The unfinished rollouts of one source of one generator.

    consumes: rows by `append`; the news that groups have an outcome, by `forget`
    produces: what is kept of a group's rollouts from earlier processes, by `find`
    waits for: the disk
    unblocked by: -
    """

    def __init__(
        self, folder: Path, source: str, *, replica: int = 0, attempt: int = 0, file_bytes: int = FILE_BYTES,
        waited_for: Callable[[], Collection[int]] | None = None,
    ) -> None:  # fmt: skip
        """folder: that of the node. No two processes that live at the same time have the same replica and attempt.

        waited_for: as `dataflow.folder.finished.Finished` has it."""
        self._files = ArrowLog(folder, f"{source}.parts", replica=replica, attempt=attempt, file_bytes=file_bytes)
        self._schema = SCHEMA.with_metadata({LINE: uuid.uuid4().hex})
        self._waited_for = waited_for
        self._found: dict[int, list[tuple[pa.RecordBatch, int]]] = defaultdict(list)
        """Rows of earlier processes by group, mapped into memory, not read into it."""

    def load(self, waited_for: Collection[int]) -> None:
        """Look at what all processes kept: of the groups waited for it can be found. Files of this replica's earlier
        attempts that have none of them are removed; other replicas may be writing theirs."""
        wanted = set(waited_for)
        for file in self._files.earlier():
            for batch in file.read():
                if not batch.schema.equals(SCHEMA):
                    break
                for row, group in enumerate(batch.column(GROUP_ID).to_pylist()):
                    if group in wanted:
                        self._found[group].append((batch, row))
                        self._files.hold(file, group)
            self._files.let_go(file)

    def find(self, group: int) -> list[PartialRow]:
        """What each earlier process kept of each of the group's rollouts, whole from its first token: the longest
        first."""
        if self._waited_for is not None:
            waited_for, self._waited_for = self._waited_for(), None
            self.load(waited_for)
        lines: dict[tuple[bytes, int], list[PartialRow]] = defaultdict(list)
        for batch, row in self._found.get(group, ()):
            found = _row(batch, row)
            lines[batch.schema.metadata[LINE.encode()], found.position].append(found)
        whole = [line for rows in lines.values() if (line := joined(rows)) is not None]
        return sorted(whole, key=lambda row: (-row.rollout.end, row.rollout.finish_reason is None))

    def append(self, rows: Sequence[PartialRow]) -> None:
        """Write rows down. Raises RunFolderError when the disk refuses."""
        self._files.append(_batch(rows, self._schema), dict.fromkeys(row.group for row in rows))

    def forget(self, group: int) -> None:
        """The group has an outcome. Files that hold no other are removed."""
        self._found.pop(group, None)
        self._files.forget(group)

    def close(self) -> None:
        """End the file that is being written; nothing is left of it when all its groups are done with."""
        self._files.close()


def joined(rows: Iterable[PartialRow]) -> PartialRow | None:
    """What the rows of one line of a rollout come to, in the order in which they were written; None without a first.

    One that begins at 0 begins anew; one that does not follow the last is passed over, as what was between is lost.
    """
    run: list[PartialRow] = []
    for row in rows:
        if row.rollout.begin == 0:
            run = [row]
        elif run and row.rollout.begin == run[-1].rollout.end and row.mark == run[-1].mark:
            run.append(row)
    if not run:
        return None
    last = run[-1]
    tokens = RolloutTokens.joined([row.rollout.tokens for row in run])
    return replace(last, rollout=replace(last.rollout, begin=0, tokens=tokens))


def _batch(rows: Sequence[PartialRow], schema: pa.Schema) -> pa.RecordBatch:
    rollouts = [row.rollout for row in rows]
    offsets = np.concatenate([[0], np.cumsum([len(rollout.tokens) for rollout in rollouts])])
    tokens = RolloutTokens.joined([rollout.tokens for rollout in rollouts])
    columns = tokens.columns(offsets, sampling_mask=True)
    if tokens.sampling_mask is None:
        columns[SAMPLING_MASK] = pa.nulls(len(rows), SAMPLING_MASK_TYPE)
    columns |= {
        GROUP_ID: pa.array([row.group for row in rows], pa.int64()),
        POSITION: pa.array([row.position for row in rows], pa.int32()),
        MARK: pa.array([row.mark for row in rows], pa.int64()),
        BEGIN: pa.array([rollout.begin for rollout in rollouts], pa.int32()),
        FINISH_REASON: pa.array([rollout.finish_reason for rollout in rollouts], pa.string()),
        COMPLETION: pa.array([rollout.text for rollout in rollouts], pa.string()),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _row(batch: pa.RecordBatch, at: int) -> PartialRow:
    def of(name: str) -> Any:
        return batch.column(name)[at]

    ids, logprobs, versions = (of(name).values.to_numpy() for name in (TOKENS, LOGPROBS, VERSIONS))
    left = of(SAMPLING_MASK).values
    rollout = PartialRollout(
        begin=of(BEGIN).as_py(),
        tokens=RolloutTokens.drawn(ids, logprobs, versions, None if left is None else SamplingMask.of_lists(left)),
        finish_reason=of(FINISH_REASON).as_py(),
        text=of(COMPLETION).as_py(),
    )
    return PartialRow(of(GROUP_ID).as_py(), of(POSITION).as_py(), of(MARK).as_py(), rollout)
