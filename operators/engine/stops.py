"""Stop strings: which tokens could end one, and where a completion hits one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dataflow.records import AnyArray

TAIL_TOKENS = 8
"""Tokens decoded at the end of a completion, beyond the characters of the longest stop string."""


class StopStrings:
    """Finds stop strings that may span tokens; it decodes only rows whose last token could end one."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        """Take the strings to stop at; each has at least one character."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tail = max(len(text) for text in stop) + TAIL_TOKENS

    def may_stop(self, vocabulary: int) -> torch.Tensor:
        """Tokens whose text has the last character of a stop string, bool [vocabulary]."""
        lasts = {text[-1] for text in self._stop}
        every = torch.ones(vocabulary, dtype=torch.bool)
        if " " in lasts:
            return every
        known = range(min(vocabulary, len(self._tokenizer)))
        texts = self._decode([[token] for token in known])
        hits = [any(last in text or "\ufffd" in text for last in lasts) for text in texts]
        every[: len(hits)] = torch.tensor(hits)
        every[len(hits) :] = False
        return every

    def find(self, tokens: AnyArray) -> str | None:
        """The text before the first stop string in a completion's tokens [any]; None where there is none."""
        if len(tokens) > self._tail:
            (end,) = self._decode([tokens[-self._tail :].tolist()])
            if not any(text in end for text in self._stop):
                return None
        (whole,) = self._decode([tokens.tolist()])
        places = [at for at in (whole.find(text) for text in self._stop) if at >= 0]
        return whole[: min(places)] if places else None

    def _decode(self, rows: list[list[int]]) -> list[str]:
        return self._tokenizer.batch_decode(rows, skip_special_tokens=True)  # type: ignore[no-any-return]


def split(tokenizer: Any, stop: Sequence[str]) -> tuple[list[int], tuple[str, ...]]:
    """Stop strings as ids, where one is a special token of the tokenizer, and the others as they are."""
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return [special[text] for text in stop if text in special], tuple(text for text in stop if text not in special)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a sequence: of the generation config, the config and the tokenizer."""
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return sorted(found)
