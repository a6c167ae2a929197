"""What an episode's function speaks with, in the process where it runs: the policy's turns, and the
world's.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from dataflow.errors import OperatorError, is_whole
from dataflow.scoring.calls import Ask
from dataflow.system.text import sound, strict_json
from operators.chat.tool_calls import ReadTurn
from operators.episodes.conversations import FIRST, ConversationOrigin
from operators.episodes.dialogue import Heard, text_of
from operators.tools.toolbox import RolloutTools

# What the policy said in a turn: its text, and the calls of tools that stand in it.


class Reply(str):
    """The text of a turn, without its end token; with the calls that were read in it.

    >>> from operators.chat.tool_calls import TextCalls
    >>> text = "so <call>add(a=2, b=3)</call>"
    >>> reply = Reply(text, TextCalls().format().read(text))
    >>> reply == text, reply.content, reply.tool_calls[0]["function"]["name"]
    (True, 'so', 'add')
    """

    tool_calls: tuple[dict[str, Any], ...]
    """As OpenAI has them: {"id", "type", "function": {"name", "arguments"}}."""
    broken: tuple[str, ...]
    """Why what looks like a call is none."""
    content: str
    """What is no call."""

    def __new__(cls, text: str, read: ReadTurn | None = None) -> Reply:
        """read: the turn as a message; None: where there are no tools."""
        reply = super().__new__(cls, text)
        message = {} if read is None else read.message
        reply.tool_calls = tuple(message.get("tool_calls") or ())
        reply.broken = () if read is None else read.broken
        reply.content = str(message.get("content", text))
        return reply


MOST_TOKENS = (1 << 31) - 1
"""Of a turn, as columns hold them."""
MOST_OF_WHY = 200
"""Characters of why a turn was invalid."""
HEARD_CHARACTERS = 1 << 20
"""Most that the world may say between two turns of the policy: more than any context holds."""


class EpisodeOver(Exception):
    """The policy has no turn left: its turns or its tokens are used up, or the context is full.

    A function that does not catch it ends with it, and the rollout's finish reason is "length".
    """


@dataclass(frozen=True, kw_only=True)
class TurnQuestion:
    """What an episode sends along when it asks for a turn."""

    heard: Sequence[Heard]
    """What the world has said since the turn before."""
    most: int | None
    rewards: Sequence[Sequence[float]]
    """Of each turn so far, by conversation."""
    rewritten: str | None = None
    """How the past was rewritten, before what was heard: see `rewriting`."""
    conversation: int = 0
    """Of which a turn is asked for."""
    origin: ConversationOrigin = FIRST
    """How that one began."""
    invalid: tuple[int, str] = (0, "")
    """How many turns so far the world could not read, and why the last of them."""

    def to_bytes(self) -> bytes:
        """For the wire."""
        return json.dumps(
            [
                list(self.heard),
                self.most,
                list(self.rewards),
                self.rewritten,
                self.conversation,
                astuple(self.origin),
                self.invalid,
            ]
        ).encode()

    @classmethod
    def of(cls, body: bytes) -> TurnQuestion:
        """What `to_bytes` made of one."""
        messages, most, rewards, rewritten, conversation, origin, invalid = json.loads(body)
        return cls(
            heard=tuple(messages),
            most=most,
            rewards=tuple(map(tuple, rewards)),
            rewritten=rewritten,
            conversation=conversation,
            origin=ConversationOrigin(*origin),
            invalid=tuple(invalid),
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an episode's function ended that did not fail."""

    heard: Sequence[Sequence[Heard]]
    """What the world said after the last turn, by conversation."""
    rewards: Sequence[Sequence[float]]
    """Of each turn, by conversation."""
    is_over: bool
    """Whether it ended because the policy had no turn left."""
    returned: Any = None
    invalid: tuple[int, str] = (0, "")
    """As `TurnQuestion.invalid`."""

    def to_bytes(self) -> bytes:
        """For the wire."""
        return json.dumps(
            [list(self.heard), list(self.rewards), self.is_over, self.returned, self.invalid]
        ).encode()

    @classmethod
    def of(cls, body: bytes) -> Outcome:
        """What `to_bytes` made of one."""
        per_chat, rewards, is_over, returned, invalid = json.loads(body)
        return cls(
            heard=tuple(map(tuple, per_chat)),
            rewards=tuple(map(tuple, rewards)),
            is_over=is_over,
            returned=returned,
            invalid=tuple(invalid),
        )


def told(text: str | None) -> bytes:
    """The answer to a function that asked for a turn; None: there is none left."""
    return json.dumps(text).encode()


def rewriting(kind: str, value: Any) -> str:
    """How a past was rewritten, as text: `keep` the last turns, another `text`, or other
    `messages`. Raises ValueError or TypeError for what is no JSON.
    """
    return strict_json(sound({kind: value}))


@dataclass
class Chats:
    """All conversations of one run of an episode's function. One of them asks at a time."""

    ask: Ask
    has_messages: bool = False
    """Whether the generator takes messages."""
    tools: RolloutTools | None = None
    """What they have of the episode's tools."""
    chats: list[Chat] = field(default_factory=list)
    is_over: bool = False
    """Whether the last turn that was asked for was one that the policy did not have."""
    is_cut_off: bool = False
    """Whether the world was."""
    invalid: tuple[int, str] = (0, "")
    """As `TurnQuestion.invalid`."""
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def rewards(self) -> list[list[float]]:
        """Of each turn, by conversation."""
        return [chat.rewards for chat in self.chats]

    def begin(self, origin: ConversationOrigin = FIRST, **state: Any) -> Chat:
        """One more conversation."""
        chat = Chat(self, len(self.chats), origin, **state)
        self.chats.append(chat)
        return chat

    async def say(self, chat: Chat, most: int | None) -> str | None:
        """A turn of a chat; None: the policy has none left."""
        async with self._asking:
            question = TurnQuestion(
                heard=chat.heard,
                most=most,
                rewards=self.rewards,
                rewritten=chat.rewritten,
                conversation=chat.number,
                origin=chat.origin,
                invalid=self.invalid,
            )
            answer = json.loads(await self.ask(question.to_bytes()))
            self.is_over = answer is None
            if answer is not None:
                chat.heard, chat.rewritten = [], None
                chat.rewards.append(0.0)
                chat.standing += 1
        return None if answer is None else str(answer)

    def outcome(self, returned: Any) -> Outcome:
        """How the function ended."""
        per_chat = [chat.heard for chat in self.chats]
        is_over = self.is_over or self.is_cut_off
        return Outcome(
            heard=per_chat,
            rewards=self.rewards,
            is_over=is_over,
            returned=returned,
            invalid=self.invalid,
        )


@dataclass
class Chat:
    """The conversation, as the function of an episode sees it: its policy is asked through the pool
    that makes the call.
    """

    among: Chats
    number: int
    origin: ConversationOrigin
    heard: list[Heard] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    rewritten: str | None = None
    standing: int = 0
    """Turns that stand in the past as they were said."""
    called: int = 0
    """Calls of tools that were read so far."""

    @property
    def turns(self) -> int:
        """Turns that the policy has had."""
        return self.origin.at + len(self.rewards)

    async def say(self, *, max_tokens: int | None = None) -> Reply:
        """The policy's turn: its text, without the end token. It is sampled, recorded and trained.
        Where the episode has tools, its `tool_calls` are the calls in it.

        max_tokens: most tokens of this turn; None: as many as the generator allows. Raises
        EpisodeOver when the policy has none left.
        """
        is_whole = isinstance(max_tokens, int) and not isinstance(max_tokens, bool)
        if max_tokens is not None and not (is_whole and max_tokens > 0):
            raise OperatorError(
                f"chat.say needs room for a token, but got max_tokens={max_tokens!r}; give a whole"
                " number from 1 up, or leave it out"
            )
        text = await self.among.say(
            self, None if max_tokens is None else min(max_tokens, MOST_TOKENS)
        )
        if text is None:
            raise EpisodeOver("the policy has no turn left")
        tools = self.among.tools
        if tools is None:
            return Reply(text)
        read = tools.read(text, self.called)
        self.called += len(read.message.get("tool_calls") or ())
        return Reply(text, read)

    async def call(self, reply: Reply) -> list[str]:
        """Make a turn's calls, one after the other; the results are added for the policy, and
        returned. The policy also reads a tool's exception, and why a call was malformed. Raises
        WorldFailed where a tool has died: the rollout is then an error, whatever the function does.
        """
        tools = self._tools()
        if reply.broken and not reply.tool_calls:
            self.invalid(reply.broken[0])
        results = await tools.results(reply.tool_calls)
        answered = [(call, result) for call, result in zip(reply.tool_calls, results, strict=True)]
        for call, result in [*answered, *((None, f"error: {reason}") for reason in reply.broken)]:
            self._hear(tools.answer(call, result))
        return results

    async def use_tools(self) -> Reply:
        """Alternate turns and calls until the policy says something without a call; that is
        returned. Raises EpisodeOver where it runs out of turns before.
        """
        while True:
            reply = await self.say()
            if not reply.tool_calls and not reply.broken:
                return reply
            await self.call(reply)

    async def session(self, toolset: Any) -> Any:
        """The session of this rollout with one of the episode's toolsets: of a Sandbox, to put
        files into it.
        """
        return await self._tools().session(toolset)

    def _tools(self) -> RolloutTools:
        if self.among.tools is None:
            raise OperatorError(
                "the episode has no tools, but one is to be called; write @episode(tools=[...])"
            )
        return self.among.tools

    def hear(self, text: str) -> None:
        """Add the world's turn: the policy reads it before its next turn, and it is not trained.
        Bytes that cannot be decoded become U+FFFD.
        """
        if not isinstance(text, str):
            raise OperatorError(
                f"chat.hear takes text, but got {type(text).__name__} {text!r:.60}; give it"
                " str(...)"
            )
        self._hear(text)

    def _hear(self, piece: Heard) -> None:
        piece = sound(piece)
        _bounded(len(text_of([*self.heard, piece])))
        if piece:
            self.heard.append(piece)

    def agent(self, role: str, history: str | Iterable[Mapping[str, Any]]) -> Chat:
        """A conversation of the same policy's in another role, which begins with this text, or with
        these messages. It has its own rewards and training rows, and the episode's budgets are for
        all together.
        """
        return self.among.begin(
            ConversationOrigin(role=sound(str(role)), history=self._history(history))
        )

    def branch(self, tries: int) -> list[Chat]:
        """This many conversations that each continue from here; this one may continue, too. The
        turns so far are trained in this one.
        """
        if not is_whole(tries, 1):
            raise OperatorError(
                f"chat.branch takes a number of tries, but got {tries!r}; give 1 or more"
            )
        origin = self.origin
        if self.rewards or origin.branch_of < 0:
            origin = replace(origin, branch_of=self.number, at=self.turns)
        return [
            self.among.begin(
                origin,
                heard=[*self.heard],
                rewritten=self.rewritten,
                standing=self.standing,
                called=self.called,
            )
            for _ in range(tries)
        ]

    def keep_last(self, turns: int) -> None:
        """Leave out what was said before the policy's last turns, so many of them, but for what the
        conversation began with. What was heard before the first that is kept goes with the rest.
        """
        if not is_whole(turns, 0):
            raise OperatorError(
                f"chat.keep_last takes a number of turns, but got {turns!r}; give 0 or more"
            )
        if turns < self.standing:
            self.standing, self.rewritten = turns, rewriting("keep", turns)

    def rewrite(self, history: str | Iterable[Mapping[str, Any]]) -> None:
        """Replace the past before the policy's next turn: a text, which in a chat is a user
        message, or messages, the assistant's included. Earlier turns are trained as they were.
        """
        self.rewritten = self._history(history)
        self.heard, self.standing = [], 0

    def reward(self, value: float) -> None:
        """What the policy's last turn was worth: `turn_reward` at its last token. Several add
        up.
        """
        if not self.rewards:
            raise OperatorError(
                f"chat.reward({value!r}) comes before the policy said anything; call chat.say first"
            )
        total = self.rewards[-1] + float(value)
        if not math.isfinite(total):
            raise OperatorError(
                f"a turn is worth a finite number, but chat.reward got {value!r:.60}; give none"
                " where none applies"
            )
        self.rewards[-1] = total

    def invalid(self, why: str) -> None:
        """Count the policy's last turn as unreadable for the world; where most turns are, the run
        logs it.
        """
        self.among.invalid = self.among.invalid[0] + 1, sound(str(why))[:MOST_OF_WHY]

    def cut_off(self) -> None:
        """The world ends before its time: the finish reason is "length", as where the policy's
        turns are used up.
        """
        self.among.is_cut_off = True

    def _history(self, history: str | Iterable[Mapping[str, Any]]) -> str:
        """As `rewriting` has it. OperatorError where no conversation can begin so."""
        if isinstance(history, str):
            rewritten = rewriting("text", history)
        else:
            messages = list(history)
            if not self.among.has_messages or not messages or not all(map(_is_message, messages)):
                raise OperatorError(
                    "a chat's history is text, or messages where Generator(chat=True), each with a"
                    f" role and a text; found {messages!r:.60}; give it what is to stand before the"
                    " policy's next turn"
                )
            rewritten = rewriting("messages", [dict(message) for message in messages])
        _bounded(len(rewritten))
        return rewritten


def _is_message(message: Any) -> bool:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str | list) or (content is None and bool(message.get("tool_calls")))


def _bounded(characters: int) -> None:
    """Raise OperatorError where the world's text is too long."""
    if characters > HEARD_CHARACTERS:
        raise OperatorError(
            f"the world says too much between two turns; found {characters} characters, the bound"
            f" is {HEARD_CHARACTERS}; cut its answer"
        )
