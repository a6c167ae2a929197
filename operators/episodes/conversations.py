"""All conversations of one rollout: the first, those of agents in other roles, branches; one
budget for all. And the record of their turns in the run folder: after a crash no turn is drawn
again.

Rows are appended before an episode hears them, and let go of when its group has an outcome: files
<node>/<replica>-<attempt>-<number>.<source>.turns (dataflow.folder.finished) beside the finished
groups.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

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
    ROW_BRANCH_TURN,
    ROW_CONVERSATION,
    ROW_ROLE,
    SAMPLING_MASK,
    SAMPLING_MASK_TYPE,
    TEMPERATURE,
    TOKENS,
    TRAINING_ROW,
    TURN,
    TURN_REWARD,
    VERSIONS,
    AnyArray,
)
from dataflow.runtime import Context
from dataflow.tokens.ragged import flat, list_lengths
from dataflow.tokens.rollout_tokens import (
    NO_TURN,
    RolloutTokens,
    SamplingMask,
    TrainingRow,
    end_to_end,
)
from dataflow.worker.host import in_flight
from operators.episodes.dialogue import (
    ContextOf,
    Dialogue,
    Heard,
    SaidTurn,
    TurnRequest,
    read,
    row_ids,
    turn_rewards,
    written,
)


@dataclass(frozen=True)
class ConversationOrigin:
    """How a conversation begins."""

    role: str = ""
    branch_of: int = -1
    """The conversation that it goes on from; -1: none."""
    at: int = 0
    """How many of that one's turns it goes on from."""
    history: str | None = None
    """What it begins with, as `chat.rewriting` has it; None: the prompt."""


FIRST = ConversationOrigin()
"""Of the conversation with the rollout's prompt."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A turn as it is written down, and which conversation it is of."""

    conversation: int
    number: int
    """Among the turns of the conversation, those that it branched from counted."""
    origin: str | None
    """With its first own turn, where it is not the first conversation, how it began, and a checksum
    of what it went on from."""
    turn: SaidTurn


Begin = Callable[[str | None], tuple[AnyArray, ContextOf]]
"""What a conversation with some history begins with in tokens, and what lays out what is said in
it."""


@dataclass(kw_only=True)
class RolloutConversations:
    """All conversations of one rollout."""

    key: str
    """Seed of the run, source, group and position."""
    max_turns: int
    max_tokens: int
    """That the policy may say in all conversations together."""
    begin: Begin
    talks: dict[int, Dialogue] = field(default_factory=dict)
    """By conversation."""
    origins: dict[int, ConversationOrigin] = field(default_factory=dict)
    rewards: Sequence[Sequence[float]] = ()
    """Of the turns that the function has had, by conversation."""

    def __post_init__(self) -> None:
        self._talk(0, FIRST)

    @property
    def temperature(self) -> float | None:
        """At which its turns are sampled; None before the first."""
        all_turns = (turn for number, turns in self._had() for turn in turns)
        return next((turn.temperature for turn in all_turns), None)

    def ask(
        self,
        heard: Sequence[Heard],
        most: int | None,
        *,
        rewards: Sequence[Sequence[float]] = ((),),
        rewritten: str | None = None,
        conversation: int = 0,
        origin: ConversationOrigin = FIRST,
    ) -> TurnRequest | str | None:
        """The function asks for its next turn in a conversation; see `Dialogue.ask`."""
        self.rewards = rewards
        talk = self._talk(conversation, origin)
        other_turns = [
            turn for number, turns in self._had() if number != conversation for turn in turns
        ]
        talk.max_turns = self.max_turns - len(other_turns)
        talk.max_tokens = self.max_tokens - sum(len(turn.tokens) for turn in other_turns)
        talk.temperature = self.temperature
        return talk.ask(talk.inherited + len(rewards[conversation]), heard, most, rewritten)

    def is_drawing(self, conversation: int) -> bool:
        """Whether a turn of it is being drawn."""
        talk = self.talks.get(conversation)
        return talk is not None and talk.waiting is not None

    def answer(
        self,
        conversation: int,
        tokens: RolloutTokens,
        text: str,
        finish_reason: str,
        temperature: float | None = None,
    ) -> RecordedTurn | None:
        """The policy's turn in a conversation, as a record to write down; see `Dialogue.answer`."""
        talk, origin = self.talks[conversation], None
        turn = talk.answer(tokens, text, finish_reason, temperature)
        if turn is None:
            return None
        number = len(talk.turns) - 1
        if conversation and number == talk.inherited:
            origin = json.dumps([*astuple(self.origins[conversation]), _seen(talk)])
        return RecordedTurn(conversation, number, origin, turn)

    def recall(self, recorded_turns: Iterable[RecordedTurn]) -> None:
        """Begin with the turns that an earlier process wrote down, in their order; a later record
        of a turn replaces an earlier one.
        """
        for recorded in recorded_turns:
            if recorded.origin is not None:
                *origin, state = json.loads(recorded.origin)
                parent = self.talks.get(origin[1])
                if origin[2] > (0 if parent is None else len(parent.turns)):
                    continue
                if _seen(self._talk(recorded.conversation, ConversationOrigin(*origin))) != state:
                    del self.talks[recorded.conversation]
            talk = self.talks.get(recorded.conversation)
            if talk is not None and talk.inherited <= recorded.number <= len(talk.turns):
                talk.turns[recorded.number :] = [recorded.turn]

    def end(self, rewards: Sequence[Sequence[float]]) -> None:
        """The function has returned, having had so many turns in each conversation."""
        self.rewards = rewards
        for number, talk in list(self.talks.items()):
            talk.end(len(rewards[number]) if number < len(rewards) else 0)

    def columns(self) -> tuple[RolloutTokens, Mapping[str, Any]]:
        """Its tokens, conversation after conversation, and the columns of
        `records.EPISODE_COLUMNS`; of a conversation without a turn, the prompt.
        """
        rows: list[TrainingRow] = []
        owners: list[int] = []
        all_rewards: list[float] = []
        firsts: dict[int, int] = {}
        branched: dict[int, int] = {}
        for number in sorted(self.talks):
            talk, origin = self.talks[number], self.origins[number]
            firsts[number], branched[number] = len(all_rewards) - talk.inherited, -1
            if origin.at:
                branched[number] = firsts[origin.branch_of] + origin.at - 1
            talk_rows = talk.rows(len(all_rewards))
            rewards = self.rewards[number] if number < len(self.rewards) else ()
            all_rewards += [*rewards[: len(talk.own)], *(0.0 for _ in talk.own[len(rewards) :])]
            rows += talk_rows
            owners += [number] * len(talk_rows)
        if not rows:
            rows, owners = (
                [TrainingRow.of([(RolloutTokens.given(self.talks[0].prompt), NO_TURN)])],
                [0],
            )
        tokens, turns_S, rows_S = end_to_end(rows)
        return tokens, {
            TURN: turns_S,
            TURN_REWARD: turn_rewards(turns_S, all_rewards),
            TRAINING_ROW: rows_S,
            ROW_CONVERSATION: owners,
            ROW_ROLE: [self.origins[number].role for number in owners],
            ROW_BRANCH_TURN: [branched[number] for number in owners],
        }

    def text(self, last: Sequence[Sequence[Heard]] = ()) -> str:
        """All turns and the world's texts after the prompt; several conversations follow one
        another, each below its role or its number. last: the world's text after the last turn, by
        conversation.
        """
        texts = {
            number: self.talks[number].text(last[number] if number < len(last) else ())
            for number in sorted(self.talks)
        }
        if len(texts) == 1:
            return texts[0]
        heads = {number: self.origins[number].role or str(number) for number in texts}
        return "\n".join(f"[{heads[number]}]\n{text}" for number, text in texts.items() if text)

    def _had(self) -> list[tuple[int, list[SaidTurn]]]:
        """The turns that the function has had, by conversation."""
        counts = enumerate(map(len, self.rewards))
        return [
            (number, self.talks[number].own[:count])
            for number, count in counts
            if number in self.talks
        ]

    def _talk(self, number: int, origin: ConversationOrigin) -> Dialogue:
        """The conversation of this number; a new one where that began otherwise."""
        talk = self.talks.get(number)
        parent = self.talks.get(origin.branch_of)
        before = [] if parent is None else parent.turns[: origin.at]
        is_same = (
            talk is not None and self.origins[number] == origin and talk.inherited == len(before)
        )
        if (
            talk
            and is_same
            and all(turn is expected for turn, expected in zip(talk.turns, before, strict=False))
        ):
            return talk
        prompt, context = self.begin(origin.history)
        key = f"{self.key}#{number}" if number else self.key
        self.talks[number] = Dialogue(
            key=key,
            prompt=prompt,
            max_turns=self.max_turns,
            max_tokens=self.max_tokens,
            context=context,
            turns=before,
            inherited=len(before),
        )
        self.origins[number] = origin
        return self.talks[number]


def _seen(talk: Dialogue) -> int:
    """A checksum of the turns that a conversation was forked after."""
    before = row_ids(talk.prompt, talk.turns[: talk.inherited])
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(before, np.int64).tobytes()) >> 1


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
            replica=context.replica,
            attempt=context.life.attempt,
            waited_for=partial(in_flight, ledger, source, folder),
        )
        for source in context.graph.columns
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
