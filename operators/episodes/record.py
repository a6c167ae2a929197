"""The policy's turns in unfinished episodes, in Arrow files of the run folder: after a crash no
turn is drawn again.

Rows are appended before an episode hears them, and let go of when its group has an outcome: files
<node>/<replica>-<attempt>-<number>.<source>.turns (dataflow.folder.finished) beside the finished
groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
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
    TEMPERATURE,
    TOKENS,
    TURN,
    VERSIONS,
    AnyArray,
)
from dataflow.runtime import Context
from dataflow.tokens.ragged import flat, list_lengths
from dataflow.tokens.rollout_tokens import RolloutTokens, SamplingMask
from dataflow.worker.host import in_flight
from operators.episodes.conversations import RecordedTurn
from operators.episodes.dialogue import SaidTurn, read, written

SCHEMA = pa.schema(
    [
        (GROUP_ID, pa.int64()),
        (POSITION, pa.int32()),
        ("conversation", pa.int32()),
        (TURN, pa.int32()),
        ("origin", pa.string()),
        ("mark", pa.int64()),  # of the prompt's tokens and the seed
        ("heard", pa.list_(pa.string())),  # each as JSON
        ("rewritten", pa.string()),
        ("begins", pa.bool_()),
        (MOST_TOKENS, pa.int32()),
        ("given", pa.list_(pa.int32())),
        (TOKENS, pa.list_(pa.int32())),
        (LOGPROBS, pa.list_(pa.float32())),
        (VERSIONS, pa.list_(pa.int32())),
        (SAMPLING_MASK, SAMPLING_MASK_TYPE),
        (COMPLETION, pa.string()),
        (FINISH_REASON, pa.string()),
        (TEMPERATURE, pa.float64()),
    ]
)


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """A turn, and whose it is."""

    group: int
    position: int
    mark: int
    said: RecordedTurn


class TurnFiles(GroupFiles):
    """The turns of one source of one episode."""

    kind, schema, once = "turns", SCHEMA, False

    def find(self, group: int, mark: int) -> Mapping[int, list[RecordedTurn]]:
        """By position, the turns that earlier processes kept of a group's rollouts, in the order in
        which they did.
        """
        by_position: dict[int, list[RecordedTurn]] = {}
        for rows in self._earlier(group):
            for kept_turn in _kept(rows):
                if kept_turn.mark == mark:
                    by_position.setdefault(kept_turn.position, []).append(kept_turn.said)
        return by_position

    def append(self, turns: Sequence[KeptTurn]) -> None:
        """Write turns down. Raises RunFolderError when the disk refuses."""
        turns = sorted(turns, key=lambda turn: turn.group)
        self._write(_batch(turns), dict.fromkeys(kept_turn.group for kept_turn in turns))


def turn_files_of(context: Context) -> dict[str, TurnFiles]:
    """By source; none without a run folder."""
    folder, ledger = context.folder, context.ledger
    if folder is None or ledger is None:
        return {}
    return {
        source: TurnFiles(
            folder.finished(context.node),
            source,
            replica=context.rank,
            attempt=context.attempt,
            waited_for=partial(in_flight, ledger, source, folder),
        )
        for source in context.columns
    }


def mark_of_prompt(key: str, prompt: AnyArray) -> int:
    """A checksum of everything but weights and world that a group's turns depend on. int64."""
    tokens = np.ascontiguousarray(prompt, np.int64).tobytes()
    return xxhash.xxh3_64_intdigest(f"{key}/".encode() + tokens) - (1 << 63)


def _batch(turns: Sequence[KeptTurn]) -> pa.RecordBatch:
    said_turns = [kept_turn.said.turn for kept_turn in turns]
    tokens = RolloutTokens.joined([turn.tokens for turn in said_turns])
    offsets = np.concatenate([[0], np.cumsum([len(turn.tokens) for turn in said_turns])])
    columns = tokens.columns(offsets, sampling_mask=True)
    if tokens.sampling_mask is None:
        columns[SAMPLING_MASK] = pa.nulls(len(turns), SAMPLING_MASK_TYPE)
    columns |= {
        GROUP_ID: pa.array([kept_turn.group for kept_turn in turns], pa.int64()),
        POSITION: pa.array([kept_turn.position for kept_turn in turns], pa.int32()),
        "conversation": pa.array([kept_turn.said.conversation for kept_turn in turns], pa.int32()),
        TURN: pa.array([kept_turn.said.number for kept_turn in turns], pa.int32()),
        "origin": pa.array([kept_turn.said.origin for kept_turn in turns], pa.string()),
        "mark": pa.array([kept_turn.mark for kept_turn in turns], pa.int64()),
        "heard": pa.array([written(turn.heard) for turn in said_turns], pa.list_(pa.string())),
        "rewritten": pa.array([turn.rewritten for turn in said_turns], pa.string()),
        "begins": pa.array([turn.begins for turn in said_turns], pa.bool_()),
        MOST_TOKENS: pa.array([turn.most for turn in said_turns], pa.int32()),
        "given": pa.array([turn.given for turn in said_turns], pa.list_(pa.int32())),
        COMPLETION: pa.array([turn.text for turn in said_turns], pa.string()),
        FINISH_REASON: pa.array([turn.finish_reason for turn in said_turns], pa.string()),
        TEMPERATURE: pa.array([turn.temperature for turn in said_turns], pa.float64()),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def drawn_tokens(rows: pa.RecordBatch) -> list[RolloutTokens]:
    """What the policy drew, by row: of the columns of answers, or of kept turns."""
    offsets = np.concatenate([[0], np.cumsum(list_lengths(rows.column(TOKENS)))])
    ids, logprobs, versions = (flat(rows.column(name)) for name in (TOKENS, LOGPROBS, VERSIONS))
    masks = rows.column(SAMPLING_MASK)
    sampling = None if masks.null_count else SamplingMask.of_lists(masks.flatten())
    whole = RolloutTokens.drawn(ids, logprobs, versions, sampling)
    return [whole[begin:end] for begin, end in itertools.pairwise(offsets.tolist())]


def _kept(rows: pa.RecordBatch) -> Iterator[KeptTurn]:
    names = (
        GROUP_ID,
        POSITION,
        "conversation",
        TURN,
        "origin",
        "mark",
        "heard",
        "rewritten",
        "begins",
        MOST_TOKENS,
        COMPLETION,
        FINISH_REASON,
        TEMPERATURE,
    )
    columns = [rows.column(name).to_pylist() for name in names]
    given_ids = rows.column("given")
    for row, (tokens, *values) in enumerate(zip(drawn_tokens(rows), *columns, strict=True)):
        (
            group,
            position,
            conversation,
            number,
            origin,
            mark,
            heard_json,
            rewritten,
            begins,
            most,
            text,
            reason,
            *_,
        ) = values
        turn = SaidTurn(
            heard=read(heard_json),
            most=most,
            rewritten=rewritten,
            begins=begins,
            given=given_ids[row].values.to_numpy(),
            tokens=tokens,
            text=text,
            finish_reason=reason,
            temperature=values[-1],
        )
        yield KeptTurn(group, position, mark, RecordedTurn(conversation, number, origin, turn))
