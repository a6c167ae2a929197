"""Conversations by the messages that callers know of them, so that a call goes on with the ids of
those before it.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from operators.chat.chat_format import ChatFormat, Message
from operators.chat.conversation import Conversation, Past
from operators.serving.exchanges import Encoded

MOST_IDS = 1 << 24
"""Token ids of all conversations that are kept, 64 MiB."""


@dataclass(frozen=True)
class KnownTurn:
    """A conversation as it stood after a turn of the policy's."""

    conversation: Conversation
    rollout_id: int
    ids: tuple[int, ...]
    """Of its last row."""
    session: str | None = None


class Sessions:
    """The latest conversations, by session, tools and messages; those used longest ago go first."""

    def __init__(self, form: ChatFormat, *, past: Past = "sampled", most: int = 1024) -> None:
        """Begin with none. past: what becomes of turns that the template writes otherwise later."""
        self.form = form
        self._past, self._most, self._ids = past, most, 0
        self._known: OrderedDict[str, KnownTurn] = OrderedDict()
        self._of: dict[str | None, set[str]] = {}
        """Keys by session."""

    def begin(
        self,
        session: str | None,
        messages: Sequence[Message],
        tools: Sequence[Message],
        *,
        options: Mapping[str, Any] | None = None,
        begins: str = "",
    ) -> tuple[Conversation, Encoded]:
        """The conversation that these messages go on with, or a new one, and its prompt's ids.
        Raises ChatError.

        options: of the chat template. begins: what the next turn is made to begin with.
        """
        form = self.form.given(options or {})
        exchange, count = self._latest(session, messages, tools, form.options)
        if exchange is None:
            conversation = Conversation(
                form, messages, tools=tools, past=self._past, continues=False
            )
            conversation.begin(begins)
            return conversation, Encoded(tuple(conversation.prompt().tolist()))
        conversation = exchange.conversation.fork()
        if any(message.get("role") == "assistant" for message in messages[count:]):
            conversation.rewrite(messages)
        else:
            conversation.hear(*messages[count:])
        conversation.begin(begins)
        ids = tuple(conversation.prompt().tolist())
        size = len(exchange.ids)
        if ids[:size] != exchange.ids:
            return conversation, Encoded(ids)
        return conversation, Encoded(ids, exchange.rollout_id, size)

    def add(
        self, session: str | None, conversation: Conversation, ids: Sequence[int], rollout_id: int
    ) -> None:
        """Remember a conversation that ends with a turn of the policy's."""
        *_, key = _keys(
            session, conversation.messages, conversation.tools, conversation.form.options
        )
        self._drop(key)
        self._known[key] = KnownTurn(conversation, rollout_id, tuple(ids), session)
        self._of.setdefault(session, set()).add(key)
        self._ids += len(ids)
        while len(self._known) > self._most or self._ids > MOST_IDS:
            self._drop(next(iter(self._known)))

    def forget(self, session: str | None) -> None:
        """Let go of all turns of a session."""
        for key in list(self._of.get(session, ())):
            self._drop(key)

    def _latest(
        self,
        session: str | None,
        messages: Sequence[Message],
        tools: Sequence[Message],
        options: Mapping[str, Any],
    ) -> tuple[KnownTurn | None, int]:
        """What is known of the longest beginning of the messages, and how many of them that are."""
        for count, key in reversed(list(enumerate(_keys(session, messages, tools, options), 1))):
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key], count
        return None, 0

    def _drop(self, key: str) -> None:
        gone = self._known.pop(key, None)
        if gone is not None:
            self._ids -= len(gone.ids)
            keys = self._of[gone.session]
            keys.discard(key)
            if not keys:
                del self._of[gone.session]


def _keys(
    session: str | None,
    messages: Sequence[Message],
    tools: Sequence[Message],
    options: Mapping[str, Any],
) -> Iterator[str]:
    """A key for every beginning of the messages."""
    digest = xxhash.xxh3_128(
        json.dumps([session, list(tools), dict(options)], sort_keys=True).encode()
    )
    for message in messages:
        digest.update(json.dumps(_plain(message), sort_keys=True).encode())
        yield digest.hexdigest()


def _plain(message: Message) -> Any:
    """The parts of a message that identify it, however a client sends it back."""
    calls = [_plain_call(call) for call in message.get("tool_calls") or ()]
    names = {"role", "tool_call_id"} | (
        set() if message.get("role") in ("assistant", "tool") else {"name"}
    )
    return {name: message[name] for name in names & set(message)} | {
        "content": message.get("content") or "",
        "calls": calls,
    }


def _plain_call(call: Mapping[str, Any]) -> Any:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [call.get("id"), function.get("name"), arguments]
