"""What the engine ends a rollout by, made from the stop strings of a request: text, and special tokens by their id."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from dataflow.records import AnyArray
from operators.engine.stop_strings import StopStrings

MOST_STOPS = 64
"""Lists of stop strings that are kept: each has a mask as wide as the vocabulary."""


class RequestStop(StopStrings):
    """Stop strings, and tokens that end a rollout without a part in its text."""

    def __init__(self, tokenizer: Any, tokens: Sequence[int], texts: Sequence[str]) -> None:
        """Take special tokens and texts to stop at, at least one of either."""
        super().__init__(tokenizer, texts or ("",))
        self._texts, self._tokens = tuple(texts), frozenset(tokens)

    def may_stop(self, vocabulary: int) -> torch.Tensor:
        """Tokens after which `find` must look, bool [vocabulary]."""
        found = super().may_stop(vocabulary) if self._texts else torch.zeros(vocabulary, dtype=torch.bool)
        found[[token for token in self._tokens if token < vocabulary]] = True
        return found

    def find(self, tokens: AnyArray) -> str | None:
        """The text before the stop in a completion's tokens [any]; None where there is none."""
        if len(tokens) and int(tokens[-1]) in self._tokens:
            return self._decode([tokens[:-1].tolist()])[0]
        return super().find(tokens) if self._texts else None


class StopCache:
    """Makes what a request stops by; requests with the same strings share it, since the engine keeps each it met."""

    def __init__(self, tokenizer: Any, ends: frozenset[int]) -> None:
        """ends: tokens that end every rollout anyway. The tokenizer is used on the engine's thread."""
        self._tokenizer, self._ends = tokenizer, ends
        self._special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self.made = functools.lru_cache(MOST_STOPS)(self._make)

    def __call__(self, stop: tuple[str, ...], ids: tuple[int, ...] = ()) -> RequestStop | None:
        """What ends a rollout at any of these strings or ids; None where end tokens do already."""
        return self.made(stop, ids)

    def _make(self, stop: tuple[str, ...], ids: tuple[int, ...]) -> RequestStop | None:
        tokens = [*ids, *(self._special[text] for text in stop if text in self._special)]
        tokens = [token for token in tokens if token not in self._ends]
        texts = [text for text in stop if text not in self._special]
        return RequestStop(self._tokenizer, tokens, texts) if tokens or texts else None
