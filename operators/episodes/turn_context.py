"""What the policy sees before a turn as tokens: its own as they were sampled, the world's as plain
text, or with a chat template's delimiters around it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.records import (
    GROUP_ID,
    MIN_VERSION,
    MOST_TOKENS,
    OF_GROUP,
    OF_SOURCE,
    SEED,
    STOP,
    TEMPERATURE,
    TOKENS,
    TURN_REQUEST,
    AnyArray,
    schema,
)
from operators.chat.chat_format import ChatFormat, Message
from operators.chat.conversation import Conversation, Past
from operators.episodes.dialogue import (
    ContextOf,
    Heard,
    SaidTurn,
    TurnRequest,
    messages_of,
    row_ids,
    text_of,
)
from operators.generation.groups import PromptGroup

KEPT_TEXTS = 4096
"""Short texts whose tokens are kept: worlds repeat themselves."""


class PlainContext:
    """The tokens of one dialogue, each text encoded alone."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.encode = functools.lru_cache(KEPT_TEXTS)(self._encoded)

    def context(
        self,
        prompt: AnyArray,
        turns: Sequence[SaidTurn],
        heard: Sequence[Heard],
        rewritten: str | None = None,
    ) -> AnyArray:
        """As `dialogue.ContextOf`."""
        if rewritten is None:
            return np.concatenate([row_ids(prompt, turns), *map(self.encode, _texts(heard))])
        begin, stands = prompt, list[SaidTurn]()
        for turn in turns:
            begin, stands = self._rewritten(begin, stands, turn.rewritten)
            stands = [*stands, turn]
        begin, stands = self._rewritten(begin, stands, rewritten)
        pieces: list[AnyArray] = []
        for place, turn in enumerate(stands):
            pieces += [*(map(self.encode, _texts(turn.heard)) if place else ()), turn.tokens.ids]
        return np.concatenate([begin, *pieces, *map(self.encode, _texts(heard))])

    def _rewritten(
        self, begin: AnyArray, turns: list[SaidTurn], rewritten: str | None
    ) -> tuple[AnyArray, list[SaidTurn]]:
        """What the conversation begins with, and which turns stand behind it."""
        if rewritten is None:
            return begin, turns
        how = json.loads(rewritten)
        if "keep" in how:
            return begin, turns[len(turns) - how["keep"] :]
        return self.encode(how["text"]), []

    def _encoded(self, text: str) -> AnyArray:
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def _texts(heard: Sequence[Heard]) -> list[str]:
    return [text_of([piece]) for piece in heard]


@dataclass(frozen=True)
class ConversationStarts:
    """How the conversations of one rollout begin."""

    plain: PlainContext
    form: ChatFormat | None
    """Where prompts are messages."""
    past: Past
    prompt: AnyArray
    """Tokens."""
    text: str
    """The prompt as it was given."""
    tools: Sequence[Message] = ()
    """Definitions that the chat template lays out."""

    def __call__(self, history: str | None) -> tuple[AnyArray, ContextOf]:
        """Tokens that a conversation begins with, and what lays it out; history: as
        `ConversationOrigin` has it. Raises ChatError.
        """
        how = {} if history is None else json.loads(history)
        if self.form is None or not len(self.prompt):
            return self.plain.encode(how["text"]) if how else self.prompt, self.plain.context
        if not how:
            return self.prompt, ChatContext(
                self.form, json.loads(self.text), past=self.past, tools=self.tools
            ).context
        words = ChatContext(self.form, _messages(how), past=self.past, tools=self.tools)
        return words.context(np.zeros(0, np.int32), (), ()), words.context


class ChatContext:
    """The context by a chat template: the world's texts are user messages after the sampled ids."""

    def __init__(
        self,
        form: ChatFormat,
        messages: Sequence[Message],
        *,
        past: Past = "sampled",
        tools: Sequence[Message] = (),
    ) -> None:
        """messages: that the conversation begins with. past: what becomes of turns that the
        template writes otherwise later. tools: their definitions.
        """
        self._form, self._messages, self._past, self._tools = form, messages, past, tools
        self._talk = Conversation(form, messages, past=past, tools=tools)
        self._begin = len(self._talk.messages)
        """Messages that the conversation began with, or was rewritten to."""
        self._had: list[SaidTurn] = []
        """The turns that it has."""
        self._beyond: tuple[tuple[Heard, ...], str | None] = (), None
        """What was heard after them, and how the past was rewritten before that."""

    def context(
        self,
        prompt: AnyArray,
        turns: Sequence[SaidTurn],
        heard: Sequence[Heard],
        rewritten: str | None = None,
    ) -> AnyArray:
        """As `dialogue.ContextOf`. Raises ChatError where there are none."""
        self._go_to(turns)
        if self._beyond != (tuple(heard), rewritten):
            self._go_on(heard, rewritten)
        return self._talk.prompt()

    def _go_to(self, turns: Sequence[SaidTurn]) -> None:
        """Let the conversation be that with these turns: that of the last time where it goes on
        from there.
        """
        had = len(self._had)
        more = turns[had:]
        is_known = had <= len(turns) and all(
            had is turn for had, turn in zip(self._had, turns, strict=False)
        )
        if not is_known or self._beyond not in [
            ((), None),
            *((turn.heard, turn.rewritten) for turn in more[:1]),
        ]:
            self._talk = Conversation(
                self._form, self._messages, past=self._past, tools=self._tools
            )
            self._begin = len(self._talk.messages)
            self._had, self._beyond, more = [], ((), None), turns
        for turn in more:
            if self._beyond != (turn.heard, turn.rewritten):
                self._go_on(turn.heard, turn.rewritten)
            self._talk.say(turn.tokens, text=self._talk.begins + turn.text)
            self._beyond = (), None
        self._had = list(turns)

    def _go_on(self, heard: Sequence[Heard], rewritten: str | None) -> None:
        if rewritten is not None:
            how = json.loads(rewritten)
            self._talk.rewrite(self._kept(how["keep"]) if "keep" in how else _messages(how))
            if "keep" not in how:
                self._begin = len(self._talk.messages)
        self._talk.hear(*messages_of(heard))
        self._beyond = tuple(heard), rewritten

    def _kept(self, turns: int) -> list[Message]:
        """The conversation's first messages, and its last turns, each with the world's texts after
        it.
        """
        messages = self._talk.messages
        places = [
            at
            for at in range(self._begin, len(messages))
            if messages[at].get("role") == "assistant"
        ]
        return [*messages[: self._begin], *(messages[places[-turns] :] if turns else ())]


def _messages(how: Mapping[str, Any]) -> list[Message]:
    """Of a history as `chat.rewriting` has it."""
    return how.get("messages") or [{"role": "user", "content": how["text"]}]


def request_rows(requests: Sequence[tuple[PromptGroup, TurnRequest]]) -> pa.RecordBatch:
    """In the columns of `TURN_REQUEST`, each with the group of the rollout that it is for."""
    columns = {
        GROUP_ID: [request.number for _, request in requests],
        OF_SOURCE: [group.source for group, _ in requests],
        OF_GROUP: [group.group_id for group, _ in requests],
        MIN_VERSION: [group.min_version for group, _ in requests],
        SEED: [request.seed for _, request in requests],
        MOST_TOKENS: [request.most for _, request in requests],
        TEMPERATURE: [request.temperature for _, request in requests],
        STOP: [request.stop or None for _, request in requests],
        TOKENS: [request.tokens for _, request in requests],
    }
    arrays = [pa.array(columns[name], kind) for name, kind in TURN_REQUEST.items()]
    return pa.RecordBatch.from_arrays(arrays, schema=schema(TURN_REQUEST))
