"""What the policy said in episodes that go on, in Arrow files of the run folder: a crash costs no turn twice.

Rows are appended before an episode hears them, and let go of when its group has an outcome: files
<node>/<replica>-<attempt>-<number>.<source>.turns (dataflow.folder.finished) beside the finished groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import xxhash

from dataflow.folder.finished import GroupFiles
from dataflow.records import (
    COMPLETION,
    FINISH_REASON,
    GROUP_ID,
    LOGPROBS,
    MOST_TOKENS,
    POSITION,
    SAMPLING_MASK,
    SAMPLING_MASK_TYPE,
    TOKENS,
    TURN,
    VERSIONS,
    AnyArray,
)
from dataflow.runtime import Context
from dataflow.tokens.rollout_tokens import RolloutTokens
from dataflow.tokens.sampling_mask import SamplingMask
from dataflow.worker.host import in_flight
from operators.episodes.conversation import SaidTurn

SCHEMA = pa.schema(
    [
        (GROUP_ID, pa.int64()),
        (POSITION, pa.int32()),
        (TURN, pa.int32()),
        ("mark", pa.int64()),  # of the prompt's tokens and the seed
        ("heard", pa.list_(pa.string())),
        (MOST_TOKENS, pa.int32()),
        ("given", pa.list_(pa.int32())),
        (TOKENS, pa.list_(pa.int32())),
        (LOGPROBS, pa.list_(pa.float32())),
        (VERSIONS, pa.list_(pa.int32())),
        (SAMPLING_MASK, SAMPLING_MASK_TYPE),
        (COMPLETION, pa.string()),
        (FINISH_REASON, pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """A turn, and whose it is."""

    group: int
    position: int
    number: int
    mark: int
    turn: SaidTurn


class TurnFiles(GroupFiles):
    """The turns of one source of one episode."""

    kind, schema, once = "turns", SCHEMA, False

    def find(self, group: int, mark: int) -> Mapping[int, list[SaidTurn]]:
        """By position, the turns that earlier processes kept of a group's rollouts, from the first on."""
        found: dict[int, list[SaidTurn]] = {}
        for rows in self._earlier(group):
            for row in range(rows.num_rows):
                kept = _kept(rows, row)
                turns = found.setdefault(kept.position, [])
                if kept.mark == mark and kept.number <= len(turns):  # a later process may have drawn one anew
                    turns[kept.number :] = [kept.turn]
        return found

    def append(self, turns: Sequence[KeptTurn]) -> None:
        """Write turns down. Raises RunFolderError when the disk refuses."""
        turns = sorted(turns, key=lambda kept: kept.group)
        self._write(_batch(turns), dict.fromkeys(kept.group for kept in turns))


def turn_files_of(context: Context) -> dict[str, TurnFiles]:
    """By source; none without a run folder."""
    folder, ledger = context.folder, context.ledger
    if folder is None or ledger is None:
        return {}
    return {
        source: TurnFiles(
            folder.finished(context.node), source, replica=context.rank, attempt=context.attempt,
            waited_for=partial(in_flight, ledger, source, folder),
        )
        for source in context.columns
    }  # fmt: skip


def mark_of_prompt(key: str, prompt: AnyArray) -> int:
    """A checksum of what a group's turns depend on beside weights and world. int64."""
    tokens = np.ascontiguousarray(prompt, np.int64).tobytes()
    return xxhash.xxh3_64_intdigest(f"{key}/".encode() + tokens) - (1 << 63)


def _batch(turns: Sequence[KeptTurn]) -> pa.RecordBatch:
    said = [kept.turn.tokens for kept in turns]
    tokens = RolloutTokens.joined(said)
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in said])])
    columns = tokens.columns(offsets, sampling_mask=True)
    if tokens.sampling_mask is None:
        columns[SAMPLING_MASK] = pa.nulls(len(turns), SAMPLING_MASK_TYPE)
    columns |= {
        GROUP_ID: pa.array([kept.group for kept in turns], pa.int64()),
        POSITION: pa.array([kept.position for kept in turns], pa.int32()),
        TURN: pa.array([kept.number for kept in turns], pa.int32()),
        "mark": pa.array([kept.mark for kept in turns], pa.int64()),
        "heard": pa.array([list(kept.turn.heard) for kept in turns], pa.list_(pa.string())),
        MOST_TOKENS: pa.array([kept.turn.most for kept in turns], pa.int32()),
        "given": pa.array([kept.turn.given for kept in turns], pa.list_(pa.int32())),
        COMPLETION: pa.array([kept.turn.text for kept in turns], pa.string()),
        FINISH_REASON: pa.array([kept.turn.finish_reason for kept in turns], pa.string()),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _kept(rows: pa.RecordBatch, row: int) -> KeptTurn:
    values = {name: rows.column(name)[row] for name in SCHEMA.names}
    turn = SaidTurn(
        heard=tuple(values["heard"].as_py()), most=values[MOST_TOKENS].as_py(),
        given=values["given"].values.to_numpy(), tokens=drawn_tokens(values),
        text=values[COMPLETION].as_py(), finish_reason=values[FINISH_REASON].as_py(),
    )  # fmt: skip
    group, position, number, mark = (values[name].as_py() for name in (GROUP_ID, POSITION, TURN, "mark"))
    return KeptTurn(group, position, number, mark, turn)


def drawn_tokens(values: Mapping[str, pa.Scalar]) -> RolloutTokens:
    """The tokens of one row, by its columns."""
    ids, logprobs, versions = (values[name].values.to_numpy() for name in (TOKENS, LOGPROBS, VERSIONS))
    left = values[SAMPLING_MASK].values
    return RolloutTokens.drawn(ids, logprobs, versions, None if left is None else SamplingMask.of_lists(left))
