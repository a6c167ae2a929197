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
from operators.serving.sessions import KnownTurn, Prompt, chat_key
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
    refusal: ApiError | None = None
    """What is said in place of an answer that cannot hold this choice."""
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
            self.error, self.refusal = news.error, news.refusal
            status = {BROKEN: 500, ABORTED: 503}.get(news.reason)
            if status is not None and self.refusal is None:
                why = self.error or "the rollout failed"
                self.refusal = ApiError(status, why, code="rollout_failed")
            self.finish_reason = "error" if self.refusal else REASONS.get(news.reason, "length")
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

    def continued(self, before: Conversation, begun: Sequence[int]) -> Conversation:
        """The conversation with this turn, once ended. begun: as in `Prompt`."""
        assert self.message is not None, "it has ended"
        conversation, message = before.fork(), self.message
        begins = conversation.begins
        if begins:
            message = {**message, "content": begins + str(message["content"])}
        text = begins + self.transcript.text
        conversation.say(self.tokens, begun=begun, text=text, message=message)
        return conversation


@dataclass(eq=False, kw_only=True)
class CallPrompt:
    """One prompt of a call, its rollouts, and what the engine was asked for."""

    group_id: int
    prompt: Prompt
    seeds: Sequence[int]
    """One for each rollout."""
    choices: list[Choice]
    work: Work | None = None

    def rollout_id(self, position: int) -> int:
        """Of the rollout at this position, as in every run folder."""
        return self.group_id * len(self.choices) + position

    @property
    def is_over(self) -> bool:
        """Whether all rollouts have ended."""
        return all(choice.finish_reason is not None for choice in self.choices)


@dataclass(eq=False, kw_only=True)
class ServedCall:
    """A request and its parts.

    consumes: news of its rollouts (`hear`, on the event loop)
    produces: the state of its choices; `finished` is called once for each part that is over
    waits for: nothing; who answers waits for `news`
    """

    request: Request
    session: str | None
    request_id: str
    created_ms: int
    """Since 1970, UTC."""
    parts: Sequence[CallPrompt]
    ends: frozenset[int]
    """Tokens that end a rollout, and are no part of its text."""
    finished: Callable[[ServedCall, CallPrompt], None]
    news: asyncio.Event = field(default_factory=asyncio.Event)
    unrecorded: ApiError | None = None

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
        refusals = (choice.refusal for choice in self.choices if choice.refusal is not None)
        return next(refusals, self.unrecorded)

    def turns(self, part: CallPrompt, vocabulary: Vocabulary) -> Iterator[KnownTurn]:
        """What a later prompt may go on from, of a prompt whose rollouts have ended."""
        prompt = part.prompt
        for position, choice in enumerate(part.choices):
            if choice.refusal is not None:
                continue
            ids, number = tuple(choice.tokens.ids.tolist()), part.rollout_id(position)
            if prompt.conversation is not None:
                conversation = choice.continued(prompt.conversation, prompt.begun)
                yield KnownTurn(
                    session=self.session,
                    key=chat_key(conversation),
                    tokens=(*prompt.tokens, *ids),
                    rollout_id=number,
                    conversation=conversation,
                )
            elif prompt.text is not None and (whole := choice.transcript.whole_tokens()):
                end = ids[-1] if whole == len(ids) - 1 and ids[-1] in self.ends else None
                text = choice.transcript.text[: choice.transcript.end_of(whole)]
                yield KnownTurn(
                    session=self.session,
                    key=prompt.text + text,
                    tokens=(*prompt.tokens, *ids[:whole]),
                    rollout_id=number,
                    end=None if end is None else (end, vocabulary.decode([end], special=True)),
                )

    def hear(self, part: CallPrompt, news: News) -> None:
        """Something happened to a rollout."""
        if part.choices[news.position].finish_reason is not None:
            return
        part.choices[news.position].hear(news, self.ends)
        if part.is_over:
            try:
                self.finished(self, part)
            except Exception as error:
                self.unrecorded = ApiError(
                    500, f"the call could not be recorded: {error}", code="not_recorded"
                )
        self.news.set()
