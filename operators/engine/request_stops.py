"""What the engine ends a rollout by, made from the stops of a request."""

from __future__ import annotations

import functools
from typing import Any

from operators.engine.stop_strings import StopStrings, apart

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
