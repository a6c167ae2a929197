"""One rollout of an episode as it comes about, turn by turn: pure, without processes and sockets.

The function runs elsewhere, and may run again: after its process ended, or in a run that goes on. What it was told is
told to it again, as long as the world says what it said before; from the first difference on the policy's turns are
drawn anew, and what was drawn behind it is no part of the rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from dataflow.records import AnyArray
from dataflow.tokens.rollout_tokens import RolloutTokens

_SIGN = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidTurn:
    """One turn of the policy, and what the world said before it."""

    heard: tuple[str, ...]
    most: int | None
    """As it was asked for."""
    given: AnyArray
    """Tokens of what was heard, int."""
    tokens: RolloutTokens
    """Of what the policy said."""
    text: str
    finish_reason: str
    temperature: float | None = None
    """At which it was sampled."""

    def follows(self, heard: Sequence[str], most: int | None) -> bool:
        """Whether it was drawn after this."""
        return self.heard == tuple(heard) and self.most == most


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
    """At which the turns before were sampled, and this one is to be, whatever the generator's is now."""
    stop: tuple[str, ...] = ()
    """Strings at which it ends; none: the generator's own."""


@dataclass(kw_only=True)
class Dialogue:
    """What the policy and the world said in one rollout."""

    key: str
    """Seed of the run, source, group and position."""
    prompt: AnyArray
    """Tokens."""
    max_turns: int
    max_tokens: int
    """That the policy may say in all turns together."""
    given: Callable[[AnyArray, Sequence[SaidTurn], Sequence[str]], AnyArray]
    """Tokens of what was heard behind some turns: `Words.given`."""
    turns: list[SaidTurn] = field(default_factory=list)
    rewards: Sequence[float] = ()
    waiting: tuple[tuple[str, ...], int | None, AnyArray] | None = None
    """Of the turn that is being drawn, what `SaidTurn` says of it."""
    is_full: bool = False
    """Whether what the world said fills the context."""

    @property
    def said(self) -> int:
        """Tokens that the policy has said."""
        return sum(len(turn.tokens) for turn in self.turns)

    def ask(self, number: int, heard: Sequence[str], most: int | None) -> TurnRequest | SaidTurn | None:
        """The function asks for its turn `number`: what is to be drawn, what was said there before, or None where the
        policy has no turn left."""
        if number < len(self.turns):
            if self.turns[number].follows(heard, most):
                return self.turns[number]
            del self.turns[number:]
        self.waiting = None
        if not self.has_room:
            return None
        return self.request(heard, most, self.given(self.prompt, self.turns, heard))

    @property
    def has_room(self) -> bool:
        """Whether the policy has a turn left."""
        return len(self.turns) < self.max_turns and self.said < self.max_tokens and not self.is_full

    def request(self, heard: Sequence[str], most: int | None, given: AnyArray) -> TurnRequest | None:
        """Wait for a turn behind what was heard, whose tokens these are; None where there is none left."""
        if not self.has_room:
            return None
        self.waiting = tuple(heard), most, given
        said = (part for turn in self.turns for part in (turn.given, turn.tokens.ids))
        tokens = np.concatenate([self.prompt, *said, given]).astype(np.int32)
        left = self.max_tokens - self.said
        room = left if most is None else min(most, left)
        turn = f"{self.key}/{len(self.turns)}"
        checksum = xxhash.xxh3_64_intdigest(f"{turn}/{room}/".encode() + tokens.tobytes()) & _SIGN
        seed = xxhash.xxh3_64_intdigest(turn.encode()) - (1 << 63)
        return TurnRequest(number=checksum, seed=seed, tokens=tokens, most=room, temperature=self.temperature)

    @property
    def temperature(self) -> float | None:
        """At which its turns are sampled; None before the first."""
        return self.turns[0].temperature if self.turns else None

    def answer(
        self, tokens: RolloutTokens, text: str, finish_reason: str, temperature: float | None = None
    ) -> SaidTurn | None:
        """What the policy said in the turn that was asked for; None where it had no room in the context. The function
        may have begun anew meanwhile."""
        assert self.waiting is not None, "it was asked for"
        if not len(tokens):
            self.is_full = True
            return None
        heard, most, given = self.waiting
        self.waiting = None
        turn = SaidTurn(
            heard=heard, most=most, given=given, tokens=tokens, text=text, finish_reason=finish_reason,
            temperature=temperature,
        )  # fmt: skip
        self.turns.append(turn)
        return turn

    def tokens(self) -> RolloutTokens:
        """Of the prompt and all turns; what the world said after the last one is not among them."""
        parts = [RolloutTokens.given(self.prompt)]
        for turn in self.turns:
            parts += [RolloutTokens.given(turn.given), turn.tokens]
        return RolloutTokens.joined(parts)

    def text(self, last: Sequence[str] = ()) -> str:
        """What was said and heard after the prompt, in its order. last: heard after the last turn."""
        return "".join([*("".join(turn.heard) + turn.text for turn in self.turns), *last])

    def turn_numbers(self) -> AnyArray:
        """By token, which of the policy's turns it is of; -1 where it is of none. int32."""
        parts = [np.full(len(self.prompt), -1, np.int32)]
        for number, turn in enumerate(self.turns):
            parts += [np.full(len(turn.given), -1, np.int32), np.full(len(turn.tokens), number, np.int32)]
        return np.concatenate(parts)

    def turn_rewards(self) -> AnyArray:
        """By token, what a turn was given, at its last token. float32; 0 elsewhere."""
        numbers = self.turn_numbers()
        found = np.zeros(len(numbers), np.float32)
        for number, reward in enumerate(self.rewards[: len(self.turns)]):
            at = np.flatnonzero(numbers == number)
            found[at[-1:]] = reward
        return found
