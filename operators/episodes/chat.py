"""What an episode's function speaks with, in the process where it runs: the policy's turns, and the world's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dataflow.errors import OperatorError
from dataflow.scoring.calls import Ask

HEARD_CHARACTERS = 1 << 20
"""Most that the world may say between two turns of the policy: more than any context holds."""


class EpisodeOver(Exception):
    """The policy has no turn left: its turns or its tokens are used up, or the context is full.

    A function that does not catch it ends with it, and the rollout's finish reason is "length"."""


class Chat(Protocol):
    """The conversation, as the function of an episode sees it."""

    @property
    def turns(self) -> int:
        """Turns that the policy has had."""

    async def say(self, *, max_tokens: int | None = None) -> str:
        """The policy's turn: what it says, without its end token. It is sampled, recorded and trained.

        max_tokens: most tokens of this turn; None: as many as the generator allows. Raises EpisodeOver when the policy
        has none left."""

    def hear(self, text: str) -> None:
        """The world's turn: it stands in the context of what the policy says next, and is not trained."""

    def reward(self, value: float) -> None:
        """What the policy's last turn was worth: `turn_reward` at its last token. Several add up."""

    def cut_off(self) -> None:
        """The world ends before its time: the finish reason is "length" as where the policy's turns are used up."""


@dataclass(frozen=True, kw_only=True)
class TurnQuestion:
    """What an episode sends along when it asks for a turn."""

    heard: Sequence[str]
    """What the world has said since the turn before."""
    most: int | None
    rewards: Sequence[float]
    """Of each turn so far."""

    def to_bytes(self) -> bytes:
        """For the wire."""
        return json.dumps([list(self.heard), self.most, list(self.rewards)]).encode()

    @classmethod
    def of(cls, body: bytes) -> TurnQuestion:
        """What `to_bytes` made of one."""
        heard, most, rewards = json.loads(body)
        return cls(heard=tuple(heard), most=most, rewards=tuple(rewards))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an episode's function ended that did not fail."""

    heard: Sequence[str]
    """What the world said after the last turn."""
    rewards: Sequence[float]
    is_over: bool
    """Whether it ended because the policy had no turn left."""
    returned: Any = None

    def to_bytes(self) -> bytes:
        """For the wire."""
        return json.dumps([list(self.heard), list(self.rewards), self.is_over, self.returned]).encode()

    @classmethod
    def of(cls, body: bytes) -> Outcome:
        """What `to_bytes` made of one."""
        heard, rewards, is_over, returned = json.loads(body)
        return cls(heard=tuple(heard), rewards=tuple(rewards), is_over=is_over, returned=returned)


def told(text: str | None) -> bytes:
    """What an episode hears when it has asked for a turn; None: there is none left."""
    return json.dumps(text).encode()


@dataclass
class AskedChat:
    """A chat whose policy is asked through the pool that makes the call."""

    ask: Ask
    heard: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    is_over: bool = False
    """Whether a turn was asked for that the policy did not have, or the world was cut off."""

    @property
    def turns(self) -> int:
        """As `Chat.turns`."""
        return len(self.rewards)

    async def say(self, *, max_tokens: int | None = None) -> str:
        """As `Chat.say`."""
        if max_tokens is not None and (isinstance(max_tokens, bool) or max_tokens < 1):
            raise OperatorError(
                f"chat.say needs room for a token, but got max_tokens={max_tokens!r}; give 1 or more, or leave it out"
            )
        heard, self.heard = self.heard, []
        question = TurnQuestion(heard=heard, most=max_tokens, rewards=self.rewards)
        said = json.loads(await self.ask(question.to_bytes()))
        if said is None:
            self.is_over = True
            raise EpisodeOver("the policy has no turn left")
        self.rewards.append(0.0)
        return str(said)

    def hear(self, text: str) -> None:
        """As `Chat.hear`."""
        if not isinstance(text, str):
            raise OperatorError(f"chat.hear takes text, but got {type(text).__name__} {text!r:.60}; give it str(...)")
        if sum(map(len, self.heard)) + len(text) > HEARD_CHARACTERS:
            raise OperatorError(
                f"the world says too much between two turns; found {len(text)} characters, the bound is "
                f"{HEARD_CHARACTERS}; cut its answer"
            )
        if text:
            self.heard.append(text)

    def reward(self, value: float) -> None:
        """As `Chat.reward`."""
        if not self.rewards:
            raise OperatorError(f"chat.reward({value!r}) comes before the policy said anything; call chat.say first")
        self.rewards[-1] += float(value)

    def cut_off(self) -> None:
        """As `Chat.cut_off`."""
        self.is_over = True
