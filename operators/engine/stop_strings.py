"""Stop strings: which tokens could end one, and where a completion hits one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dataflow.records import AnyArray
from operators.models.errors import ModelError

TAIL_TOKENS = 8
"""Tokens decoded at the end of a completion, beyond the bytes of the longest stop string."""


class StopStrings:
    """Finds stop strings that may span tokens; it decodes only rows whose last token could end one."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        """Take the strings to stop at; each has at least one character."""
        self._tokenizer = tokenizer
        self.strings = tuple(stop)
        self._tail = max(len(text.encode()) for text in stop) + TAIL_TOKENS
        self._mask: torch.Tensor | None = None

    def may_stop(self, vocabulary: int) -> torch.Tensor:
        """Tokens whose text has the last character of a stop string, bool [vocabulary]."""
        if self._mask is None or len(self._mask) != vocabulary:
            self._mask = self._may_stop(vocabulary)
        return self._mask

    def _may_stop(self, vocabulary: int) -> torch.Tensor:
        lasts = {text[-1] for text in self.strings}
        every = torch.ones(vocabulary, dtype=torch.bool)
        if " " in lasts:
            return every
        texts = _token_texts(self._tokenizer)[:vocabulary]
        every[: len(texts)] = torch.tensor([any(last in text or "\ufffd" in text for last in lasts) for text in texts])
        every[len(texts) :] = False
        return every

    def find(self, tokens: AnyArray) -> str | None:
        """The text before the first stop string in a completion's tokens [any]; None where there is none."""
        if len(tokens) > self._tail:
            (end,) = self._decode([tokens[-self._tail :].tolist()])
            if not any(text in end for text in self.strings):
                return None
        (whole,) = self._decode([tokens.tolist()])
        places = [at for at in (whole.find(text) for text in self.strings) if at >= 0]
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


def split(tokenizer: Any, stop: Sequence[str | int], vocabulary: int) -> tuple[list[int], tuple[str, ...]]:
    """Stops as ids, where one is a special token of the tokenizer or a number, and the strings as they are.

    vocabulary: tokens that the model knows.

    Raises:
        ModelError: a stop that can never occur.
    """
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    ids = [special.get(each, each) for each in stop if isinstance(each, int) or each in special]
    strings = tuple(each for each in stop if isinstance(each, str) and each not in special)
    for token in ids:
        if not 0 <= token < vocabulary:
            raise ModelError(
                f"stop token {token} can never occur: the model knows tokens 0 to {vocabulary - 1}; "
                f"take it out of stop, or name one of the tokenizer's special tokens {list(special)[:8]}"
            )
    written = set("".join(_token_texts(tokenizer))) if strings else set()
    for text in strings:
        missing = sorted(set(text) - written)
        if missing and "\ufffd" not in written:
            raise ModelError(
                f"stop string {text!r} can never occur: no token of the tokenizer writes {missing}; "
                f"take it out of stop, or name one of its special tokens {list(special)[:8]}"
            )
    return ids, strings


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a sequence: of the generation config, the config and the tokenizer."""
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return sorted(found)
