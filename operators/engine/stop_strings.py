"""What a completion ends by: special tokens by their ids, and texts, in whose last characters a
token may be.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dataflow.records import AnyArray
from operators.chat.chat_format import ChatError, ChatFormat
from operators.chat.chat_template import mixed_stop, special_tokens
from operators.models.folders import ModelError

TAIL_TOKENS = 8
"""Tokens decoded at the end of a completion, beyond the bytes of the longest stop string."""


class StopStrings:
    """Finds stop strings that may span tokens, and tokens that end a rollout without a part in its
    text; it decodes only rows whose last token could end one.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str | int]) -> None:
        """Take what to stop at: ids, and strings of at least one character, each a special token's
        text or without any in it (ModelError).
        """
        self._tokenizer = tokenizer
        self.strings = tuple(stop)
        """As they were given."""
        tokens, self._texts = apart(tokenizer, stop)
        self._tokens = frozenset(tokens)
        self._tail = max((len(text.encode()) for text in self._texts), default=0) + TAIL_TOKENS
        self._mask: torch.Tensor | None = None

    def may_stop(self, vocabulary: int) -> torch.Tensor:
        """Tokens that are to stop at, or whose text has the last character of a string that is,
        bool [vocabulary].
        """
        if self._mask is None or len(self._mask) != vocabulary:
            self._mask = self._may_stop(vocabulary)
        return self._mask

    def _may_stop(self, vocabulary: int) -> torch.Tensor:
        lasts = {text[-1] for text in self._texts}
        every = torch.full((vocabulary,), " " in lasts)
        every[[token for token in self._tokens if token < vocabulary]] = True
        if lasts and " " not in lasts:
            texts = _token_texts(self._tokenizer)[:vocabulary]
            every[: len(texts)] |= torch.tensor(
                [any(last in text or "\ufffd" in text for last in lasts) for text in texts]
            )
        return every

    def find(self, tokens: AnyArray) -> str | None:
        """The text before the first stop in a completion's tokens [any]; None where there is
        none.
        """
        if len(tokens) and int(tokens[-1]) in self._tokens:
            return self._decode([tokens[:-1].tolist()])[0]
        if not self._texts:
            return None
        if len(tokens) > self._tail:
            (end,) = self._decode([tokens[-self._tail :].tolist()])
            if not any(text in end for text in self._texts):
                return None
        (whole,) = self._decode([tokens.tolist()])
        places = [at for at in (whole.find(text) for text in self._texts) if at >= 0]
        return whole[: min(places)] if places else None

    def _decode(self, rows: list[list[int]]) -> list[str]:
        return self._tokenizer.batch_decode(rows, skip_special_tokens=True)  # type: ignore[no-any-return]


_TEXTS: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


def _token_texts(tokenizer: Any) -> list[str]:
    """The text of every token alone, decoded once for each tokenizer."""
    if tokenizer not in _TEXTS:
        _TEXTS[tokenizer] = tokenizer.batch_decode(
            [[token] for token in range(len(tokenizer))], skip_special_tokens=True
        )
    return _TEXTS[tokenizer]


def apart(tokenizer: Any, stop: Sequence[str | int]) -> tuple[list[int], tuple[str, ...]]:
    """Stops as ids, where one is a special token of the tokenizer or a number, and the strings as
    they are.

    Raises ModelError for a string with a special token in it: none is a part of the text that
    strings are looked for in.
    """
    special = special_tokens(tokenizer)
    ids = [
        word if isinstance(word, int) else special[word]
        for word in stop
        if isinstance(word, int) or word in special
    ]
    strings = tuple(word for word in stop if isinstance(word, str) and word not in special)
    for text in strings:
        if (fault := mixed_stop(text, special)) is not None:
            raise ModelError(fault)
    return ids, strings


def split(
    tokenizer: Any, stop: Sequence[str | int], vocabulary: int
) -> tuple[list[int], tuple[str, ...]]:
    """`apart`, of stops that can occur.

    vocabulary: tokens that the model knows.

    Raises:
        ModelError: a stop that can never occur.
    """
    ids, strings = apart(tokenizer, stop)
    special = list(special_tokens(tokenizer))[:8]
    for token in ids:
        if not 0 <= token < vocabulary:
            raise ModelError(
                f"stop token {token} can never occur: the model knows tokens 0 to {vocabulary - 1};"
                f" take it out of stop, or name one of the tokenizer's special tokens {special}"
            )
    written = set("".join(_token_texts(tokenizer))) if strings else set()
    for text in strings:
        missing = sorted(set(text) - written)
        if missing and "\ufffd" not in written:
            raise ModelError(
                f"stop string {text!r} can never occur: no token of the tokenizer writes {missing};"
                f" take it out of stop, or name one of its special tokens {special}"
            )
    return ids, strings


def stops_of(
    tokenizer: Any, model: Any, stop: Sequence[str | int], vocabulary: int, *, chat: bool
) -> tuple[frozenset[int], tuple[str, ...]]:
    """Tokens, and strings, at which a completion ends: those asked for, the model's own, and what
    ends a turn in the tokenizer's chat template. chat: where that is no token, its text. Raises
    ModelError as `split`.
    """
    ids, strings = split(tokenizer, stop, vocabulary)
    ends = {*ids, *end_tokens(model, tokenizer)}
    try:
        form = ChatFormat(tokenizer)
    except ChatError:
        return frozenset(ends), strings
    ends |= {token for token in form.ends if token < vocabulary}
    return frozenset(ends), tuple(dict.fromkeys((*strings, *(form.stops if chat else ()))))


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a sequence: of the generation config, the config and the tokenizer."""
    tokens: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        tokens.update([ids] if isinstance(ids, int) else ids or [])
    return sorted(tokens)


MOST_STOPS = 64
"""Lists of stops that are kept: each has a mask as wide as the vocabulary."""


class StopCache:
    """Makes what a request stops by; requests with the same strings share it, since the engine
    keeps each it met.
    """

    def __init__(self, tokenizer: Any, ends: frozenset[int]) -> None:
        """ends: tokens that end every rollout anyway. The tokenizer is used on the engine's
        thread.
        """
        self._tokenizer, self._ends = tokenizer, ends
        self.made = functools.lru_cache(MOST_STOPS)(self._make)

    def __call__(self, stop: tuple[str, ...], ids: tuple[int, ...] = ()) -> StopStrings | None:
        """What ends a rollout at any of these strings or ids; None where end tokens do already.
        Raises ModelError as `apart`.
        """
        return self.made(stop, ids)

    def _make(self, stop: tuple[str, ...], ids: tuple[int, ...]) -> StopStrings | None:
        tokens, texts = apart(self._tokenizer, (*ids, *stop))
        token_ids = [token for token in tokens if token not in self._ends]
        return StopStrings(self._tokenizer, (*token_ids, *texts)) if token_ids or texts else None
