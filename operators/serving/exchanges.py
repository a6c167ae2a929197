"""Recent exchanges by the text that they make, so that a conversation goes on with the tokens it
was made of.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from operators.chat.chat_template import text_ids
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
