"""What an episode's function speaks with, in the process where it runs: the policy's turns, and the world's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
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

    def keep_last(self, turns: int) -> None:
        """Leave out what was said before the policy's last turns, so many of them, but for what the conversation began
        with. What was heard before the first that is kept goes with the rest."""

    def rewrite(self, history: str | Iterable[Mapping[str, Any]]) -> None:
        """Another conversation than what was said and heard stands before the policy's next turn: a text, which in a
        chat is a message of the user's, or messages, those of the assistant's too. What was said is trained as it was."""


@dataclass(frozen=True, kw_only=True)
class TurnQuestion:
    """What an episode sends along when it asks for a turn."""

    heard: Sequence[str]
    """What the world has said since the turn before."""
    most: int | None
    rewards: Sequence[float]
    """Of each turn so far."""
    rewritten: str | None = None
    """How the past was rewritten, before what was heard: see `rewriting`."""

    def to_bytes(self) -> bytes:
        """For the wire."""
        return json.dumps([list(self.heard), self.most, list(self.rewards), self.rewritten]).encode()

    @classmethod
    def of(cls, body: bytes) -> TurnQuestion:
        """What `to_bytes` made of one."""
        heard, most, rewards, rewritten = json.loads(body)
        return cls(heard=tuple(heard), most=most, rewards=tuple(rewards), rewritten=rewritten)


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


def rewriting(kind: str, value: Any) -> str:
    """How a past was rewritten, as text: `keep` the last turns, another `text`, or other `messages`."""
    return json.dumps({kind: value})


@dataclass
class AskedChat:
    """A chat whose policy is asked through the pool that makes the call."""

    ask: Ask
    has_messages: bool = False
    """Whether the generator takes messages."""
    heard: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    is_over: bool = False
    """Whether a turn was asked for that the policy did not have."""
    rewritten: str | None = None
    standing: int = 0
    """Turns that stand in the past as they were said."""

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
        question = TurnQuestion(heard=self.heard, most=max_tokens, rewards=self.rewards, rewritten=self.rewritten)
        said = json.loads(await self.ask(question.to_bytes()))
        self.is_over = said is None
        if said is None:
            raise EpisodeOver("the policy has no turn left")
        self.heard, self.rewritten = [], None
        self.rewards.append(0.0)
        self.standing += 1
        return str(said)

    def hear(self, text: str) -> None:
        """As `Chat.hear`."""
        if not isinstance(text, str):
            raise OperatorError(f"chat.hear takes text, but got {type(text).__name__} {text!r:.60}; give it str(...)")
        _bounded(sum(map(len, self.heard)) + len(text))
        if text:
            self.heard.append(text)

    def keep_last(self, turns: int) -> None:
        """As `Chat.keep_last`."""
        if isinstance(turns, bool) or not isinstance(turns, int) or turns < 0:
            raise OperatorError(f"chat.keep_last takes a number of turns, but got {turns!r}; give 0 or more")
        if turns < self.standing:
            self.standing, self.rewritten = turns, rewriting("keep", turns)

    def rewrite(self, history: str | Iterable[Mapping[str, Any]]) -> None:
        """As `Chat.rewrite`."""
        if isinstance(history, str):
            made = rewriting("text", history)
        else:
            messages = list(history)
            if not self.has_messages or not messages or not all(isinstance(each, Mapping) for each in messages):
                raise OperatorError(
                    f"chat.rewrite takes text, or messages where Generator(chat=True); found {messages!r:.60}; give it "
                    f"what is to stand before the policy's next turn"
                )
            made = rewriting("messages", [dict(message) for message in messages])
        _bounded(len(made))
        self.heard, self.standing, self.rewritten = [], 0, made

    def reward(self, value: float) -> None:
        """As `Chat.reward`."""
        if not self.rewards:
            raise OperatorError(f"chat.reward({value!r}) comes before the policy said anything; call chat.say first")
        self.rewards[-1] += float(value)


def _bounded(characters: int) -> None:
    """Raise OperatorError where the world says more than it may."""
    if characters > HEARD_CHARACTERS:
        raise OperatorError(
            f"the world says too much between two turns; found {characters} characters, the bound is "
            f"{HEARD_CHARACTERS}; cut its answer"
        )
