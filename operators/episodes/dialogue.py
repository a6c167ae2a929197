"""One conversation of an episode as it comes about, turn by turn: pure, without processes and
sockets.

The function runs elsewhere, and may run again: after its process ended, or in a run that goes on.
What it was told is told to it again, as long as the world says what it said before; from the first
difference on the policy's turns are drawn anew, and what was drawn behind it is no part of the
rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from dataflow.records import AnyArray
from dataflow.tokens.rollout_tokens import RolloutTokens
from dataflow.tokens.training_rows import NO_TURN, TrainingRow
from operators.episodes.heard import Heard, text_of

_SIGN = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidTurn:
    """One turn of the policy, and what the world said before it."""

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
    """A turn that is being drawn; the rest is what `SaidTurn` says of it."""

    at: int
    """Which of the policy's turns it is."""
    request: int
    """`TurnRequest.number`."""
    heard: tuple[Heard, ...]
    most: int | None
    rewritten: str | None
    begins: bool
    given: AnyArray


Context = Callable[[AnyArray, Sequence[SaidTurn], Sequence[Heard], str | None], AnyArray]
"""Tokens of all that the policy sees, from the prompt, the turns so far, what was heard behind them
and how the past was rewritten before that: `TurnContext.context`."""


@dataclass(kw_only=True)
class Dialogue:
    """What the policy and the world said in one conversation."""

    key: str
    """Seed of the run, source, group, position and conversation."""
    prompt: AnyArray
    """Tokens."""
    max_turns: int
    max_tokens: int
    """That the policy may say in all turns together."""
    context: Context
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
        """The function asks for its turn `number`: what is to be drawn, what was said there before,
        or None where the policy has no turn left.
        """
        if number < len(self.turns) and self.turns[number].follows(heard, most, rewritten):
            return self.turns[number].text
        self.waiting = None
        turns = self.turns[:number]
        left = self.max_tokens - sum(len(turn.tokens) for turn in turns[self.inherited :])
        if number - self.inherited >= self.max_turns or left < 1:
            return None
        tokens = self.context(self.prompt, turns, heard, rewritten).astype(np.int32)
        room = left if most is None else min(most, left)
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
        """What the policy said in the turn that was asked for, in place of whatever was said there
        before; None where it had no room in the context. The function may have begun anew
        meanwhile.
        """
        asked, self.waiting = self.waiting, None
        assert asked is not None, "it was asked for"
        if not len(tokens):
            self.full = asked.request
            return None
        turn = SaidTurn(
            heard=asked.heard,
            most=asked.most,
            rewritten=asked.rewritten,
            begins=asked.begins,
            given=asked.given,
            tokens=tokens,
            text=text,
            finish_reason=finish_reason,
            temperature=temperature,
        )
        self.turns[asked.at :] = [turn]
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
        """Its training rows in which the policy said something, its own turns numbered from
        `first`. What the world said after the last turn is not among them.
        """
        found: list[list[tuple[RolloutTokens, int]]] = [
            [(RolloutTokens.given(self.prompt), NO_TURN)]
        ]
        for at, turn in enumerate(self.turns, -self.inherited):
            if turn.begins:
                found.append([])
            said = (
                (turn.tokens, first + at)
                if at >= 0
                else (RolloutTokens.given(turn.tokens.ids), NO_TURN)
            )
            found[-1] += [(RolloutTokens.given(turn.given), NO_TURN), said]
        rows = [TrainingRow.of(parts) for parts in found]
        return [row for row in rows if (row.turns != NO_TURN).any()]

    def text(self, last: Sequence[Heard] = ()) -> str:
        """What was said and heard in its own turns, in their order. last: heard after the last
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
    found = np.zeros(len(turns_S), np.float32)
    for number, reward in enumerate(rewards):
        at = np.flatnonzero(turns_S == number)
        found[at[-1:]] = reward
    return found
