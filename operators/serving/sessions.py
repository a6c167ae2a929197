"""What calls go on from: the latest turns of every session, found by their text or by the messages
that a caller knows."""

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

MOST_SIZE = 1 << 25
"""Token ids and characters of all turns that are kept, about 200 MiB."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of a call as tokens, and where they come from."""

    tokens: tuple[int, ...]
    shown: str = ""
    """As it is recorded: text, or chat messages as JSON."""
    text: str | None = None
    """As rendered, where a later prompt may go on from it by its text."""
    conversation: Conversation | None = None
    """Where a later prompt may go on from it by its messages."""
    begun: tuple[int, ...] = ()
    """The last of its tokens: those that the turn is made to begin with, as a tool has to be
    called."""
    parent: int | None = None
    """The rollout whose tokens it begins with."""
    reused: int = 0
    """How many tokens those are."""


@dataclass(frozen=True, kw_only=True)
class KnownTurn:
    """A prompt and what the model wrote after it."""

    session: str | None
    key: str | bytes
    """The text of both; where a stop string cut a token in two, up to that token. Of a
    conversation, a digest of its messages."""
    tokens: tuple[int, ...]
    """Of both; of a conversation, of its last row."""
    rollout_id: int
    end: tuple[int, str] | None = None
    """The end token that the model wrote after the text, and its text, where it wrote one."""
    conversation: Conversation | None = None
    """As it stood after the turn."""

    @property
    def size(self) -> int:
        """What it takes of the store."""
        return len(self.tokens) + len(self.key)


class TurnStore:
    """The latest turns, up to `most` of them; those used longest ago go first."""

    def __init__(self, most: int = 1024) -> None:
        """Begin with none."""
        self._most, self._size = most, 0
        self._turns: OrderedDict[tuple[str | None, str | bytes], KnownTurn] = OrderedDict()
        self._keys: dict[str | None, set[str | bytes]] = {}
        """By session."""

    def add(self, turn: KnownTurn) -> None:
        """Remember a turn; one of the same session and key is replaced."""
        self._drop(turn.session, turn.key)
        self._turns[turn.session, turn.key] = turn
        self._keys.setdefault(turn.session, set()).add(turn.key)
        self._size += turn.size
        while len(self._turns) > self._most or self._size > MOST_SIZE:
            self._drop(*next(iter(self._turns)))

    def find(self, session: str | None, text: str) -> KnownTurn | None:
        """The longest of the session that `text` goes on from; looks at those of the session
        alone.
        """
        texts = (key for key in self._keys.get(session, ()) if isinstance(key, str))
        return self.get(session, max(filter(text.startswith, texts), key=len, default=None))

    def get(self, session: str | None, key: str | bytes | None) -> KnownTurn | None:
        """The one of this key."""
        if key is None or (session, key) not in self._turns:
            return None
        self._turns.move_to_end((session, key))
        return self._turns[session, key]

    def forget(self, session: str | None) -> None:
        """Let go of all turns of a session, without a look at those of others."""
        for key in list(self._keys.get(session, ())):
            self._drop(session, key)

    def _drop(self, session: str | None, key: str | bytes) -> None:
        gone = self._turns.pop((session, key), None)
        if gone is not None:
            self._size -= gone.size
            self._keys[session].discard(key)
            if not self._keys[session]:
                del self._keys[session]


def text_prompt(
    vocabulary: Vocabulary, turns: TurnStore, text: str, *, session: str | None, chat: bool
) -> Prompt:
    """Tokens of a prompt's text, those of an earlier turn first where the text goes on from it.

    They are used where the whole spells the same text as the tokenizer's own tokens do; else the
    text is tokenised. chat: the text comes from a chat template, which has put special tokens where
    they belong.
    """
    own = _ids(vocabulary.tokenizer, text, special=not chat)
    earlier = turns.find(session, text)
    if earlier is None:
        return Prompt(own, text, text)
    earlier_ids, tail = earlier.tokens, text[len(earlier.key) :]
    if earlier.end is not None and tail.startswith(earlier.end[1]):
        earlier_ids, tail = (*earlier_ids, earlier.end[0]), tail[len(earlier.end[1]) :]
    tokens = earlier_ids + _ids(vocabulary.tokenizer, tail, special=False)
    if vocabulary.decode(tokens) != vocabulary.decode(own):
        return Prompt(own, text, text)
    return Prompt(tokens, text, text, parent=earlier.rollout_id, reused=len(earlier_ids))


def _ids(tokenizer: Any, text: str, *, special: bool) -> tuple[int, ...]:
    return tuple(text_ids(tokenizer, [text], begins=special)[0]) if text else ()


def chat_prompt(
    form: ChatFormat,
    turns: TurnStore,
    messages: Sequence[Message],
    tools: Sequence[Message],
    *,
    session: str | None,
    past: Past,
    begins: str = "",
) -> Prompt:
    """Tokens of the conversation that these messages go on with, or of a new one. Raises ChatError.

    past: what becomes of turns that the template writes otherwise later. begins: what the next turn
    is made to begin with.
    """
    known: KnownTurn | None = None
    keys = list(enumerate(_keys(messages, tools, form.options), 1))
    while known is None and keys:
        count, key = keys.pop()
        known = turns.get(session, key)
    if known is None or known.conversation is None:
        conversation = Conversation(form, messages, tools=tools, past=past, continues=False)
    else:
        conversation = known.conversation.fork()
        if any(message.get("role") == "assistant" for message in messages[count:]):
            conversation.rewrite(messages)
        else:
            conversation.hear(*messages[count:])
    conversation.begin(begins)
    ids = tuple(conversation.prompt().tolist())
    if known is None or ids[: len(known.tokens)] != known.tokens:
        return Prompt(ids, conversation=conversation)
    size = len(known.tokens)
    return Prompt(ids, conversation=conversation, parent=known.rollout_id, reused=size)


def chat_key(conversation: Conversation) -> bytes:
    """Of a conversation that ends with a turn of the policy's."""
    form = conversation.form
    *_, key = _keys(conversation.messages, conversation.tools, form.options)
    return key


def _keys(
    messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any]
) -> Iterator[bytes]:
    """A key for every beginning of the messages."""
    digest = xxhash.xxh3_128(json.dumps([list(tools), dict(options)], sort_keys=True).encode())
    for message in messages:
        digest.update(json.dumps(_plain(message), sort_keys=True).encode())
        yield digest.digest()


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
