"""What unfinished rollouts have drawn, in Arrow files of the run folder: a crash costs a long rollout its last tokens.

A generator's process appends stretches of rollouts now and then, and lets go of a group when it has an outcome: files
<node>/<replica>-<attempt>-<number>.<lane>.parts (dataflow.folder.arrow_log) beside the finished ones. The stretches
that one process wrote of a rollout are a line; lines are never joined with one another, as other weights may have
drawn them.
"""

import itertools
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
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
    AnyArray,
)

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
class Stretch:
    """Some tokens of a completion, as they were drawn."""

    begin: int
    """Tokens of the completion before them."""
    tokens: AnyArray
    """int32 [n]."""
    logprobs: AnyArray
    """float32 [n]."""
    versions: AnyArray
    """int32 [n]."""
    masks: Sequence[AnyArray] | None = None
    """By token, the ids that truncation left, int32; none where it left all. None where that is not recorded."""
    finish_reason: str | None = None
    """Why the rollout ended with them; None while it goes on."""
    text: str | None = None
    """Of an ended rollout, the completion, where it is not simply its tokens."""

    @property
    def end(self) -> int:
        """Tokens of the completion up to the last of them."""
        return self.begin + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch, and whose it is."""

    group: int
    position: int
    mark: int
    """Checksum of what a rollout depends on beside the weights: its prompt's tokens and the seed. int64."""
    stretch: Stretch


class Parts:
    """The unfinished rollouts of one lane of one generator.

    consumes: stretches by `append`; the news that groups have an outcome, by `forget`
    produces: what is kept of a group's rollouts from earlier processes, by `find`
    waits for: the disk
    unblocked by: -
    """

    def __init__(
        self, folder: Path, lane: str, *, replica: int = 0, attempt: int = 0, file_bytes: int = FILE_BYTES,
        waited_for: Callable[[], Collection[int]] | None = None,
    ) -> None:  # fmt: skip
        """folder: that of the node. No two processes that live at the same time have the same replica and attempt.

        waited_for: as `dataflow.folder.finished.Finished` has it."""
        self._files = ArrowLog(folder, f"{lane}.parts", replica=replica, attempt=attempt, file_bytes=file_bytes)
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

    def find(self, group: int) -> list[Piece]:
        """What each earlier process kept of each of the group's rollouts, whole from its first token: the longest
        first."""
        if self._waited_for is not None:
            waited_for, self._waited_for = self._waited_for(), None
            self.load(waited_for)
        lines: dict[tuple[bytes, int], list[Piece]] = defaultdict(list)
        for batch, row in self._found.get(group, ()):
            piece = _piece(batch, row)
            lines[batch.schema.metadata[LINE.encode()], piece.position].append(piece)
        whole = [line for pieces in lines.values() if (line := joined(pieces)) is not None]
        return sorted(whole, key=lambda piece: (-piece.stretch.end, piece.stretch.finish_reason is None))

    def append(self, pieces: Sequence[Piece]) -> None:
        """Write stretches down. Raises RunFolderError when the disk refuses."""
        self._files.append(_batch(pieces, self._schema), dict.fromkeys(piece.group for piece in pieces))

    def forget(self, group: int) -> None:
        """The group has an outcome. Files that hold no other are removed."""
        self._found.pop(group, None)
        self._files.forget(group)

    def close(self) -> None:
        """End the file that is being written; nothing is left of it when all its groups are done with."""
        self._files.close()


def joined(pieces: Iterable[Piece]) -> Piece | None:
    """What the pieces of one line of a rollout come to, in the order in which they were written; None without a first.

    One that begins at 0 begins anew; one that does not follow the last is passed over, as what was between is lost.
    """
    run: list[Piece] = []
    for piece in pieces:
        if piece.stretch.begin == 0:
            run = [piece]
        elif run and piece.stretch.begin == run[-1].stretch.end and piece.mark == run[-1].mark:
            run.append(piece)
    if not run:
        return None
    parts, last = [piece.stretch for piece in run], run[-1]
    masked = all(part.masks is not None for part in parts)
    whole = Stretch(
        begin=0,
        tokens=np.concatenate([part.tokens for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        masks=[mask for part in parts for mask in part.masks or ()] if masked else None,
        finish_reason=last.stretch.finish_reason,
        text=last.stretch.text,
    )
    return Piece(last.group, last.position, last.mark, whole)


def _batch(pieces: Sequence[Piece], schema: pa.Schema) -> pa.RecordBatch:
    parts = [piece.stretch for piece in pieces]
    offsets: AnyArray = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([len(part.tokens) for part in parts], out=offsets[1:])

    def ragged(arrays: list[AnyArray]) -> pa.ListArray:
        return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(arrays)))

    made: list[Any] = [
        pa.array([piece.group for piece in pieces], pa.int64()),
        pa.array([piece.position for piece in pieces], pa.int32()),
        pa.array([piece.mark for piece in pieces], pa.int64()),
        pa.array([part.begin for part in parts], pa.int32()),
        ragged([part.tokens for part in parts]),
        ragged([part.logprobs for part in parts]),
        ragged([part.versions for part in parts]),
        _masks(parts, offsets),
        pa.array([part.finish_reason for part in parts], pa.string()),
        pa.array([part.text for part in parts], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(made, schema=schema)


def _masks(parts: Sequence[Stretch], offsets: AnyArray) -> pa.ListArray:
    if any(part.masks is None for part in parts):
        return pa.nulls(len(parts), SAMPLING_MASK_TYPE)
    masks = [mask for part in parts for mask in part.masks or ()]
    inner: AnyArray = np.zeros(len(masks) + 1, np.int32)
    np.cumsum([len(mask) for mask in masks], out=inner[1:])
    ids = pa.array(np.concatenate([np.zeros(0, np.int32), *masks]), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.ListArray.from_arrays(inner, ids))


def _by_token(masks: pa.ListArray) -> list[AnyArray]:
    ids, ends = masks.values.to_numpy(), masks.offsets.to_numpy()
    return [ids[first:end] for first, end in itertools.pairwise(ends.tolist())]


def _piece(batch: pa.RecordBatch, row: int) -> Piece:
    def of(name: str) -> Any:
        return batch.column(name)[row]

    masks = of(SAMPLING_MASK).values
    stretch = Stretch(
        begin=of(BEGIN).as_py(),
        tokens=of(TOKENS).values.to_numpy(),
        logprobs=of(LOGPROBS).values.to_numpy(),
        versions=of(VERSIONS).values.to_numpy(),
        masks=None if masks is None else _by_token(masks),
        finish_reason=of(FINISH_REASON).as_py(),
        text=of(COMPLETION).as_py(),
    )
    return Piece(of(GROUP_ID).as_py(), of(POSITION).as_py(), of(MARK).as_py(), stretch)
