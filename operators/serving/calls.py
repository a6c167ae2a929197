"""A call in progress: its choices so far, and its rows once all have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.chat.chat_format import Message
from operators.chat.conversation import Conversation
from operators.chat.tool_calls import CallFormat
from operators.engine.interface import ABORTED, BROKEN, STOPPED
from operators.serving.errors import ApiError
from operators.serving.requests import Request
from operators.serving.rows import CallGroup, Completion
from operators.serving.sessions import Encoded, ServedExchange
from operators.serving.text import Transcript, Vocabulary
from operators.serving.work import News, Work

REASONS = {STOPPED: "stop"}
"""Finish reason of a rollout that ended well; any other way is `length`."""


@dataclass(eq=False)
class Choice:
    """One rollout as the caller sees it: everything so far, which only grows."""

    index: int
    transcript: Transcript
    tokens: RolloutTokens = field(default_factory=lambda: RolloutTokens.joined(()))
    """Of the completion."""
    alternatives: Sequence[Sequence[tuple[int, float]]] = ()
    """By token, where they were asked for."""
    calls: CallFormat | None = None
    """How calls of tools are read; None: they are not."""
    tools: Sequence[Message] = ()
    message: Message | None = None
    """The turn as a message, once ended; calls read."""
    finish_reason: str | None = None
    """stop, length, tool_calls or error, once ended."""
    error: str | None = None
    failed: int | None = None
    """HTTP status of an answer that cannot hold this choice."""
    refusal: ApiError | None = None
    """What is said in its place, where it is more than that."""
    first_call: int = 0
    """Number of the first call of a tool in it."""

    def hear(self, news: News, ends: frozenset[int]) -> None:
        """Take in the engine's news."""
        count, ids = len(self.tokens), news.tokens.ids
        ended_at = len(ids)
        if news.reason == STOPPED and ended_at and int(ids[-1]) in ends:
            ended_at -= 1
        for token in ids[count:ended_at].tolist():
            self.transcript.push(token)
        if len(ids) >= count:
            self.tokens, self.alternatives = news.tokens, news.alternatives
        if news.reason is not None:
            self.transcript.finish(int(ids[-1]) if news.reason == STOPPED and len(ids) else None)
            self.error = news.error
            self.refusal = news.refusal
            self.failed = (
                {BROKEN: 500, ABORTED: 503}.get(news.reason)
                if news.refusal is None
                else news.refusal.status
            )
            self.finish_reason = "error" if self.failed else REASONS.get(news.reason, "length")
            self.message = {"role": "assistant", "content": self.transcript.text}
            if self.calls is not None:
                read = self.calls.read(self.transcript.text, self.tools, first=self.first_call)
                self.message = read.message
            if "tool_calls" in self.message and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"

    @property
    def shown(self) -> str:
        """What of the text may be shown now, as content: no part of a call."""
        if self.message is not None:
            return str(self.message["content"])
        text = self.transcript.text
        return text if self.calls is None else text[: self.calls.certain(text)].rstrip()

    @property
    def completion(self) -> Completion:
        """The choice as a row is made of it."""
        return Completion(
            text=self.transcript.text,
            tokens=self.tokens,
            finish_reason={"tool_calls": "stop"}.get(
                self.finish_reason or "error", self.finish_reason or "error"
            ),
            error=self.error,
        )


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt of a call before it starts."""

    shown: str
    """As it is recorded."""
    text: str | None
    """As rendered, where a later prompt may go on from it by its text."""
    encoded: Encoded
    conversation: Conversation | None = None
    """Where a later prompt may go on from it by its messages."""
    begun: tuple[int, ...] = ()
    """The last of its tokens: those that the turn is made to begin with, as a tool has to be
    called."""


@dataclass(eq=False)
class CallPrompt:
    """One prompt of a call, its rollouts, and what the engine was asked for."""

    group: CallGroup
    choices: list[Choice]
    text: str | None
    """The prompt as rendered; None where it was given as token ids, or has a conversation."""
    conversation: Conversation | None = None
    begun: tuple[int, ...] = ()
    """As in `AskedPrompt`."""
    work: Work | None = None

    @property
    def is_over(self) -> bool:
        """Whether all rollouts have ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def continued(self) -> Iterator[tuple[int, Conversation, list[int]]]:
        """Of each choice its rollout, the conversation with it, and the ids of both."""
        for position, choice in enumerate(self.choices):
            if self.conversation is None or choice.failed or choice.message is None:
                continue
            conversation = self.conversation.fork()
            begins, message = conversation.begins, choice.message
            if begins:
                message = {**message, "content": begins + str(message["content"])}
            text = begins + choice.transcript.text
            conversation.say(choice.tokens, begun=self.begun, text=text, message=message)
            ids = [*self.group.prompt_tokens, *choice.tokens.ids.tolist()]
            yield self.group.rollout_id(position), conversation, ids

    def exchanges(self, vocabulary: Vocabulary, ends: frozenset[int]) -> list[ServedExchange]:
        """What a later prompt may go on from."""
        if self.text is None:
            return []
        exchanges = []
        for position, choice in enumerate(self.choices):
            ids = tuple(choice.tokens.ids.tolist())
            whole = choice.transcript.whole_tokens()
            if choice.failed or not whole:
                continue
            end = ids[-1] if whole == len(ids) - 1 and ids[-1] in ends else None
            exchanges.append(
                ServedExchange(
                    session=self.group.session,
                    text=self.text + choice.transcript.text[: choice.transcript.end_of(whole)],
                    tokens=(*self.group.prompt_tokens, *ids[:whole]),
                    end=None if end is None else (end, vocabulary.decode([end], special=True)),
                    rollout_id=self.group.rollout_id(position),
                )
            )
        return exchanges


class ServedCall:
    """A request and its parts.

    consumes: news of its rollouts (`hear`, on the event loop)
    produces: the state of its choices; `finished` is called once for each part that is over
    waits for: nothing; who answers waits for `news`
    """

    def __init__(
        self,
        request: Request,
        parts: Sequence[CallPrompt],
        ends: frozenset[int],
        finished: Callable[[CallPrompt], None],
    ) -> None:
        """No news yet."""
        self.request, self.parts = request, parts
        self.request_id = parts[0].group.request_id
        self.created = parts[0].group.created_ms // 1000
        self.news = asyncio.Event()
        self.unrecorded: ApiError | None = None
        self._ends, self._finished = ends, finished

    @property
    def choices(self) -> list[Choice]:
        """Of all parts, in the order of their index."""
        return [choice for part in self.parts for choice in part.choices]

    @property
    def is_over(self) -> bool:
        """Whether every rollout has ended."""
        return all(part.is_over for part in self.parts)

    @property
    def failure(self) -> ApiError | None:
        """Why the call cannot be answered, if it cannot."""
        for choice in self.choices:
            if choice.failed:
                why = choice.error or "the rollout failed"
                return choice.refusal or ApiError(choice.failed, why, code="rollout_failed")
        return self.unrecorded

    def hear(self, part: CallPrompt, news: News) -> None:
        """Something happened to a rollout."""
        if part.choices[news.position].finish_reason is not None:
            return
        part.choices[news.position].hear(news, self._ends)
        if part.is_over:
            try:
                self._finished(part)
            except Exception as error:
                self.unrecorded = ApiError(
                    500, f"the call could not be recorded: {error}", code="not_recorded"
                )
        self.news.set()
