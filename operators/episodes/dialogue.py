"""One conversation of an episode as it comes about, turn by turn: pure, without processes and
sockets.

The function runs elsewhere, and may run again: after its process ended, or in a run that goes on.
What it was told is told to it again, as long as the world says what it said before; from the first
difference on the policy's turns are drawn anew, and what was drawn behind it is no part of the
rollout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import xxhash

from dataflow.records import AnyArray
from dataflow.tokens.rollout_tokens import NO_TURN, RolloutTokens, TrainingRow
from operators.chat.chat_format import Message

Heard: TypeAlias = str | Message
"""A text, or the message of a tool's, which the chat template lays out in its own way."""


def text_of(heard: Iterable[Heard]) -> str:
    """All of it as text.

    >>> text_of(["so ", {"role": "tool", "content": "5"}])
    'so 5'
    """
    return "".join(
        piece if isinstance(piece, str) else str(piece.get("content") or "") for piece in heard
    )


def messages_of(heard: Iterable[Heard]) -> list[Message]:
    """It as messages: texts that follow each other are one of the user's.

    >>> messages_of(["a", "b", {"role": "tool", "content": "5"}])
    [{'role': 'user', 'content': 'ab'}, {'role': 'tool', 'content': '5'}]
    """
    messages: list[Message] = []
    texts: list[str] = []
    for piece in [*heard, None]:
        if isinstance(piece, str):
            texts.append(piece)
            continue
        if texts:
            messages.append({"role": "user", "content": "".join(texts)})
            texts = []
        if piece is not None:
            messages.append(piece)
    return messages


def written(heard: Sequence[Heard]) -> list[str]:
    """It as lines of JSON, for a file."""
    return [json.dumps(piece) for piece in heard]


def read(lines: Iterable[str]) -> tuple[Heard, ...]:
    """What `written` made of it."""
    return tuple(json.loads(line) for line in lines)


_SIGN = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidTurn:
    """One turn of the policy, and the world's text before it."""

    heard: tuple[Heard, ...]
    most: int | None
    """As it was asked for."""
    rewritten: str | None = None
    """How the past was rewritten before what was heard: `chat.rewriting`."""
    begins: bool = False
    """Whether a training row begins with it, because what the policy saw does not go on from the
    row before."""
    given: AnyArray
    """Tokens between it and the turn before, int; where it begins a row, all that the policy
    saw."""
    tokens: RolloutTokens
    """Of what the policy said."""
    text: str
    finish_reason: str
    temperature: float | None = None
    """At which it was sampled."""

    def follows(
        self, heard: Sequence[Heard], most: int | None, rewritten: str | None = None
    ) -> bool:
        """Whether it was drawn after this."""
        return (self.heard, self.most, self.rewritten) == (tuple(heard), most, rewritten)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A turn that the generator is to draw."""

    number: int
    """A checksum of all that it is drawn from but the weights; 0 or more."""
    seed: int
    tokens: AnyArray
    """The conversation so far, int32."""
    most: int
    temperature: float | None
    """At which the turns before were sampled, and this one is to be, whatever the generator's is
    now."""
    stop: tuple[str, ...] = ()
    """Strings at which it ends; none: the generator's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingTurn:
    """A turn that is being drawn; see `SaidTurn` for the other fields."""

    at: int
    """Which of the policy's turns it is."""
    request: int
    """`TurnRequest.number`."""
    heard: tuple[Heard, ...]
    most: int | None
    rewritten: str | None
    begins: bool
    given: AnyArray


ContextOf = Callable[[AnyArray, Sequence[SaidTurn], Sequence[Heard], str | None], AnyArray]
"""Tokens of all that the policy sees, from the prompt, the turns so far, what was heard behind them
and how the past was rewritten before that. int32."""


@dataclass(kw_only=True)
class Dialogue:
    """One conversation, turn by turn: the policy's and the world's."""

    key: str
    """Seed of the run, source, group, position and conversation."""
    prompt: AnyArray
    """Tokens."""
    max_turns: int
    max_tokens: int
    """That the policy may say in all turns together."""
    context: ContextOf
    turns: list[SaidTurn] = field(default_factory=list)
    inherited: int = 0
    """How many of these are of the conversation that it branched from, which are no part of its
    own."""
    temperature: float | None = None
    """At which its next turn is sampled; None: as the generator samples then."""
    waiting: WaitingTurn | None = None
    full: int | None = None
    """The request that found no room in the context."""

    def ask(
        self, number: int, heard: Sequence[Heard], most: int | None, rewritten: str | None = None
    ) -> TurnRequest | str | None:
        """The function asks for its turn `number`: a request to draw it, its text if it was drawn
        before, or None where the policy has no turn left.
        """
        if number < len(self.turns) and self.turns[number].follows(heard, most, rewritten):
            return self.turns[number].text
        self.waiting = None
        turns = self.turns[:number]
        tokens_left = self.max_tokens - sum(len(turn.tokens) for turn in turns[self.inherited :])
        if number - self.inherited >= self.max_turns or tokens_left < 1:
            return None
        tokens = self.context(self.prompt, turns, heard, rewritten).astype(np.int32)
        room = tokens_left if most is None else min(most, tokens_left)
        turn = f"{self.key}/{number}"
        checksum = xxhash.xxh3_64_intdigest(f"{turn}/{room}/".encode() + tokens.tobytes()) & _SIGN
        if checksum == self.full:
            return None
        before = row_ids(self.prompt, turns)
        goes_on = np.array_equal(tokens[: len(before)], before)
        self.waiting = WaitingTurn(
            at=number,
            request=checksum,
            heard=tuple(heard),
            most=most,
            rewritten=rewritten,
            begins=not goes_on,
            given=tokens[len(before) :] if goes_on else tokens,
        )
        seed = xxhash.xxh3_64_intdigest(turn.encode()) - (1 << 63)
        return TurnRequest(
            number=checksum, seed=seed, tokens=tokens, most=room, temperature=self.temperature
        )

    def answer(
        self, tokens: RolloutTokens, text: str, finish_reason: str, temperature: float | None = None
    ) -> SaidTurn | None:
        """Record the policy's turn that was asked for, in place of an earlier one of that number;
        None where the context had no room. The function may have restarted meanwhile.
        """
        pending, self.waiting = self.waiting, None
        assert pending is not None, "it was asked for"
        if not len(tokens):
            self.full = pending.request
            return None
        turn = SaidTurn(
            heard=pending.heard,
            most=pending.most,
            rewritten=pending.rewritten,
            begins=pending.begins,
            given=pending.given,
            tokens=tokens,
            text=text,
            finish_reason=finish_reason,
            temperature=temperature,
        )
        self.turns[pending.at :] = [turn]
        return turn

    @property
    def own(self) -> list[SaidTurn]:
        """Its turns that are not of the conversation that it branched from."""
        return self.turns[self.inherited :]

    def end(self, turns: int) -> None:
        """The function has returned, having had so many turns: what an earlier run of it had behind
        these is no part of the rollout.
        """
        del self.turns[self.inherited + turns :]

    def rows(self, first: int = 0) -> list[TrainingRow]:
        """Its training rows with at least one turn of the policy, own turns numbered from `first`.
        The world's text after the last turn is left out.
        """
        row_parts: list[list[tuple[RolloutTokens, int]]] = [
            [(RolloutTokens.given(self.prompt), NO_TURN)]
        ]
        for at, turn in enumerate(self.turns, -self.inherited):
            if turn.begins:
                row_parts.append([])
            own_part = (
                (turn.tokens, first + at)
                if at >= 0
                else (RolloutTokens.given(turn.tokens.ids), NO_TURN)
            )
            row_parts[-1] += [(RolloutTokens.given(turn.given), NO_TURN), own_part]
        rows = [TrainingRow.of(parts) for parts in row_parts]
        return [row for row in rows if (row.turns != NO_TURN).any()]

    def text(self, last: Sequence[Heard] = ()) -> str:
        """Its own turns and the world's texts, in order. last: the world's text after the last
        turn.
        """
        return "".join([*(text_of(turn.heard) + turn.text for turn in self.own), text_of(last)])


def row_ids(prompt: AnyArray, turns: Sequence[SaidTurn]) -> AnyArray:
    """Tokens of the training row as it stands behind some turns."""
    parts = [prompt]
    for turn in turns:
        parts = (
            [turn.given, turn.tokens.ids] if turn.begins else [*parts, turn.given, turn.tokens.ids]
        )
    return np.concatenate(parts)


def turn_rewards(turns_S: AnyArray, rewards: Sequence[float]) -> AnyArray:
    """By token, what a turn was given, at its last token. float32; 0 elsewhere. turns_S: the turn
    of each token.
    """
    rewards_S = np.zeros(len(turns_S), np.float32)
    for number, reward in enumerate(rewards):
        at = np.flatnonzero(turns_S == number)
        rewards_S[at[-1:]] = reward
    return rewards_S
