"""How a call goes on with the ids of those before it: by the text of recent exchanges, or by the
messages that a caller knows."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from operators.chat.chat_format import ChatFormat, Message
from operators.chat.chat_template import text_ids
from operators.chat.conversation import Conversation, Past
from operators.serving.text import Vocabulary

MOST_CHARACTERS = 1 << 25
"""Characters of all exchanges that are kept, about 32 MiB of text and 64 MiB of token ids."""


@dataclass(frozen=True, kw_only=True)
class ServedExchange:
    """A prompt and what the model wrote after it."""

    session: str | None
    text: str
    """Of prompt and completion; where a stop string cut a token in two, up to that token."""
    tokens: tuple[int, ...]
    """What stands for that text."""
    end: tuple[int, str] | None
    """The end token that the model wrote then, and its text, where it wrote one."""
    rollout_id: int


@dataclass(frozen=True)
class Encoded:
    """The tokens of a prompt, and where they come from."""

    tokens: tuple[int, ...]
    parent: int | None = None
    """The rollout whose tokens it begins with."""
    reused: int = 0
    """How many tokens those are."""


class Exchanges:
    """The latest exchanges, up to `most` of them; those used longest ago go first."""

    def __init__(self, most: int = 1024) -> None:
        """Begin with none."""
        self._most = most
        self._kept: OrderedDict[tuple[str | None, str], ServedExchange] = OrderedDict()
        self._of: dict[str | None, set[str]] = {}
        """Texts by session."""
        self._characters = 0

    def add(self, exchange: ServedExchange) -> None:
        """Remember an exchange; one of the same session and text is replaced."""
        key = exchange.session, exchange.text
        self._drop(key)
        self._kept[key] = exchange
        self._of.setdefault(exchange.session, set()).add(exchange.text)
        self._characters += len(exchange.text)
        while len(self._kept) > self._most or self._characters > MOST_CHARACTERS:
            self._drop(next(iter(self._kept)))

    def find(self, session: str | None, text: str) -> ServedExchange | None:
        """The longest exchange of the session that `text` goes on from; looks at those of the
        session alone.
        """
        prefix = max(filter(text.startswith, self._of.get(session, ())), key=len, default=None)
        if prefix is None:
            return None
        self._kept.move_to_end((session, prefix))
        return self._kept[session, prefix]

    def forget(self, session: str | None) -> None:
        """Let go of all exchanges of a session, without a look at those of others."""
        for text in list(self._of.get(session, ())):
            self._drop((session, text))

    def _drop(self, key: tuple[str | None, str]) -> None:
        gone = self._kept.pop(key, None)
        if gone is not None:
            self._characters -= len(gone.text)
            texts = self._of[gone.session]
            texts.discard(gone.text)
            if not texts:
                del self._of[gone.session]


def encode(
    vocabulary: Vocabulary, exchanges: Exchanges, text: str, *, session: str | None, chat: bool
) -> Encoded:
    """Tokens of a prompt's text, those of an earlier exchange first where the text goes on from it.

    They are used where the whole spells the same text as the tokenizer's own tokens do; else the
    text is tokenised. chat: the text comes from a chat template, which has put special tokens where
    they belong.
    """
    own = _ids(vocabulary.tokenizer, text, special=not chat)
    earlier = exchanges.find(session, text)
    if earlier is None:
        return Encoded(own)
    earlier_ids, tail = earlier.tokens, text[len(earlier.text) :]
    if earlier.end is not None and tail.startswith(earlier.end[1]):
        earlier_ids, tail = (*earlier_ids, earlier.end[0]), tail[len(earlier.end[1]) :]
    tokens = earlier_ids + _ids(vocabulary.tokenizer, tail, special=False)
    if vocabulary.decode(tokens) != vocabulary.decode(own):
        return Encoded(own)
    return Encoded(tokens, earlier.rollout_id, len(earlier_ids))


def _ids(tokenizer: Any, text: str, *, special: bool) -> tuple[int, ...]:
    return tuple(text_ids(tokenizer, [text], begins=special)[0]) if text else ()


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
