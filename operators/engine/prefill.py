"""The new tokens of a step, laid out: prefixes that start or go on, each for one row or for the
siblings of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dataflow.records import AnyArray
from operators.engine.attention import AttentionLayout, NewTokens
from operators.engine.kv_cache import KVCache
from operators.engine.pages import PAGE, Prefix


@dataclass(frozen=True)
class NewRow:
    """The new part of the flattened row: M tokens."""

    layout: NewTokens
    tokens: torch.Tensor
    """int64 [M]."""
    positions: torch.Tensor
    """int64 [M]."""
    last: AnyArray
    """Index of each prefix's last token among the M."""


class Fused(Protocol):
    """A native implementation of the whole model: from tokens to logits, filling the cache on its
    way.
    """

    def refresh(self) -> None:
        """Take over the weights that the model has now."""

    def let_go(self) -> None:
        """Give back what it made of them, until `refresh`."""

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        layout: AttentionLayout,
        new: Sequence[Prefix],
    ) -> torch.Tensor:
        """Logits [n + I, V] of the newest tokens [n] at positions [n], and of the new prefixes."""


def lay_out(prefixes: Sequence[Prefix], put: Callable[[AnyArray], torch.Tensor]) -> NewRow:
    """Where everything goes. `put` brings an array onto the device."""
    counts = np.array([prefix.new for prefix in prefixes])
    ends = np.cumsum(counts)
    firsts = ends - counts
    at = np.arange(int(counts.max()))
    padded = np.minimum(firsts[:, None] + at, ends[:, None] - 1)
    packed = np.nonzero((at < counts[:, None]).ravel())[0]
    positions = np.concatenate([np.arange(p.cached * PAGE, len(p.tokens)) for p in prefixes])
    source, page = [], []
    for first, prefix in zip(firsts, prefixes, strict=True):
        begin, whole, end = (
            prefix.cached * PAGE,
            len(prefix.tokens) // PAGE * PAGE,
            len(prefix.tokens),
        )
        place = np.arange(begin, whole)
        source.append(first + place - begin)
        page.append(np.asarray(prefix.tables[0], np.int64)[place // PAGE])
        tail = np.arange(max(whole, begin), end)
        if len(tail):
            for table in prefix.tables:
                source.append(first + tail - begin)
                page.append(np.full(len(tail), table[whole // PAGE], np.int64))
    sources = np.concatenate(source)
    new = NewTokens(
        padded=put(padded),
        packed=put(packed),
        source=put(sources),
        page=put(np.concatenate(page)),
        offset=put(positions[sources] % PAGE),
    )
    if any(prefix.cached for prefix in prefixes):
        pages: AnyArray = np.zeros(
            (len(prefixes), max(len(prefix.tables[0]) for prefix in prefixes)), np.int64
        )
        for i, prefix in enumerate(prefixes):
            pages[i, : len(prefix.tables[0])] = prefix.tables[0]
        new.before = put(np.array([prefix.cached * PAGE for prefix in prefixes]))
        new.table = put(pages)
    tokens = np.concatenate([prefix.tokens[prefix.cached * PAGE :] for prefix in prefixes])
    return NewRow(new, put(tokens), put(positions), ends - 1)
