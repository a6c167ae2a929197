"""Keys and values in pages, and attention over them, registered with transformers.

The model is called on one flattened sequence of N tokens: first the newest token of each active
row, then the tokens of new prefixes, one after the other without padding. Axes: n active rows, P
pages, W pages of a row, L positions, H query heads, K key/value heads (H too, of pages), D width of
a head.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from dataflow.records import AnyArray
from operators.engine.pages import PAGE, Prefix, pages_for
from operators.engine.prefill import NewTokens, prefill, write
from operators.models.folders import ModelError


class KVCache:
    """Pages of keys and values for every layer; a layer's tensors are made when it is first
    written.
    """

    def __init__(self, pages: int) -> None:
        """Allocate `pages` pages, and one more that pads a batch and is never read."""
        self.pages = pages
        self.scratch = pages
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(
        self, index: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [P + 1, H, PAGE, D] and values of a layer, made like its new ones [1, H, N, D]."""
        pair = self._layers.get(index)
        if pair is None:
            pair = (self._empty(key), self._empty(value))
            self._layers[index] = pair
        return pair

    @property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values by layer, of those written so far."""
        return [self._layers[index] for index in sorted(self._layers)]

    @property
    def token_bytes(self) -> int:
        """Bytes that one position takes in all layers."""
        return sum(side[0].nbytes // PAGE for both in self._layers.values() for side in both)

    def clear(self, pages: torch.Tensor) -> None:
        """Zero some pages: a masked position weighs nothing only as long as it holds a finite
        number.
        """
        for keys, values in self._layers.values():
            keys[pages] = 0
            values[pages] = 0

    def copy(
        self,
        from_pages: torch.Tensor,
        from_places: torch.Tensor,
        to_pages: torch.Tensor,
        to_places: torch.Tensor,
    ) -> None:
        """Copy keys and values of single positions, given as pages and places in them, int64 [m]
        each.
        """
        for side in itertools.chain(*self._layers.values()):
            side[to_pages, :, to_places] = side[from_pages, :, from_places]

    def drop(self) -> None:
        """Free the memory; its content is lost. It is allocated again at the next write."""
        self._layers.clear()

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.pages + 1, like.shape[1], PAGE, like.shape[3])
        nbytes = math.prod(shape) * like.element_size()
        try:
            if like.device.type == "cpu":
                return huge_pages(nbytes).view(like.dtype).view(shape)
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        except (RuntimeError, OSError, ValueError) as error:
            raise ModelError(
                f"the KV-cache does not fit: {self.pages} pages of {PAGE} tokens need {2 * nbytes}"
                f" bytes in every layer ({error}); lower slots, context_tokens or cache_bytes of"
                " the generator"
            ) from error


def page_count(*, slots: int, context_tokens: int, token_bytes: int, budget: int) -> int:
    """Pages for `slots` sequences of `context_tokens` tokens, as far as `budget` bytes allow.

    Raises:
        ModelError: not even one sequence fits.
    """
    slot_pages = pages_for(context_tokens)
    affordable = budget // max(1, PAGE * token_bytes)
    if affordable < slot_pages:
        raise ModelError(
            f"the KV-cache cannot hold one rollout: {context_tokens} tokens take"
            f" {slot_pages * PAGE * token_bytes} bytes ({token_bytes} each), but its budget is"
            f" {budget}"
            " bytes; raise cache_bytes, or lower context_tokens"
        )
    return min(affordable, slots * slot_pages)


def huge_pages(nbytes: int) -> torch.Tensor:
    """Zeros uint8 [nbytes] on huge pages where the system gives them; memory is taken when first
    written.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


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


def copy_partial_pages(
    cache: KVCache, new: Sequence[Prefix], put: Callable[[AnyArray], torch.Tensor]
) -> None:
    """Give each row of a new prefix its copy of the last page, where that is not full."""
    pairs: list[tuple[int, int]] = []
    for prefix in new:
        last = len(prefix.tokens) // PAGE
        if len(prefix.tokens) % PAGE:
            pairs += [(prefix.tables[0][last], table[last]) for table in prefix.tables[1:]]
    if pairs:
        origin, target = put(np.array(pairs, np.int64).T)
        for side in itertools.chain(*cache.layers):
            side[target] = side[origin]


NAME = "dataflow_slots"
"""Under which transformers knows `attend`."""

REFUSED = ("s_aux", "position_bias", "cache")
"""Arguments that change attention in ways that `attend` does not know."""


class Kernel(Protocol):
    """A native implementation of `decode`: same arguments, same result up to rounding."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layout: AttentionLayout,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Write key and value [K, n, D] into the pages and attend with query [H, n, D]: [n, H,
        D].
        """


@dataclass(eq=False)
class AttentionLayout:
    """What one forward pass holds, for attention to know; goes through the model as
    `slot_layout`.
    """

    cache: KVCache
    positions: torch.Tensor
    """Position of the newest token in each of the n active rows, int64 [n]."""
    longest: int
    """Positions to attend to: the largest of `positions` plus one."""
    table: torch.Tensor
    """Pages of each active row, int32 [n, W]."""
    runs: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None
    """Says, to a kernel that asks, where runs of neighbouring rows begin, and the end, int32 [r +
    1], and how many of their first pages the rows of each share, int32 [r]; those are full."""
    new: NewTokens | None = None
    kernel: Kernel | None = None
    """What attends for the active rows; None: torch's operators."""
    together: bool = False
    """Whether rows may be tokens of one sequence, each of which attends to those before it."""
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    """By sliding window: 0 where a row attends and -inf elsewhere, float32 [n, 1, L]."""

    def mask(self, window: int | None, length: int) -> torch.Tensor:
        """What is added to the scores of the active rows, float32 [n, 1, length]."""
        mask = self.masks.get(window)
        if mask is None:
            at = torch.arange(length, device=self.positions.device)
            last = self.positions[:, None, None]
            hidden = at > last if window is None else (at > last) | (at <= last - window)
            mask = torch.zeros(hidden.shape, device=at.device).masked_fill_(hidden, -torch.inf)
            self.masks[window] = mask
        return mask


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    slot_layout: AttentionLayout | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values into their pages and attend: query [1, H, N, D] to output [1,
    N, H, D].

    Raises:
        ModelError: the model asks for a kind of attention that is not known here.
    """
    if (
        slot_layout is None
        or attention_mask is not None
        or any(options.get(name) is not None for name in REFUSED)
    ):
        unsupported = [
            name for name in REFUSED if options.get(name) is not None
        ] or "a mask of its own, or no slots"
        raise ModelError(
            f"{type(module).__name__} cannot generate from slots: its attention is called with"
            f" {unsupported}; use a decoder whose attention is causal, full or with a sliding"
            " window"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    keys, values = slot_layout.cache.layer(module.layer_idx, key, value)  # type: ignore[arg-type]
    active = len(slot_layout.positions)
    q, k, v = query[0], key[0], value[0]
    parts: list[torch.Tensor] = []
    if slot_layout.new is not None:
        write(slot_layout.new, keys, k[:, active:])
        write(slot_layout.new, values, v[:, active:])
    if active:
        step = slot_layout.kernel or decode
        if slot_layout.together and slot_layout.kernel is not None:
            write_newest(slot_layout, keys, values, k[:, :active], v[:, :active])
        now = (q[:, :active], k[:, :active], v[:, :active])
        parts.append(step(*now, keys, values, slot_layout, scale, sliding_window, softcap))
    if slot_layout.new is not None:
        fresh = (q[:, active:], k[:, active:], v[:, active:])
        parts.append(prefill(slot_layout.new, *fresh, keys, values, scale, sliding_window, softcap))
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def write_newest(
    layout: AttentionLayout,
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Put the key and value [K, n, D] of each active row's newest token into its page."""
    page = layout.table.gather(1, (layout.positions // PAGE)[:, None])[:, 0].long()
    offset = layout.positions % PAGE
    keys[page, :, offset] = key.transpose(0, 1)
    values[page, :, offset] = value.transpose(0, 1)


def decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: AttentionLayout,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One new token per active row by torch's operators: query [H, n, D], key and value [K, n, D]
    to [n, H, D].
    """
    n, kv_heads = query.shape[1], key.shape[0]
    write_newest(layout, keys, values, key, value)
    table = layout.table[:, : -(-layout.longest // PAGE)].long()
    length = table.shape[1] * PAGE
    past_keys = keys[table].transpose(1, 2).reshape(n, kv_heads, length, -1)
    scores = torch.matmul(
        query.transpose(0, 1).reshape(n, kv_heads, -1, query.shape[2]), past_keys.transpose(2, 3)
    )
    scores = scores.float().view(n, -1, length) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores + layout.mask(window, length), dim=-1).to(values.dtype)
    past_values = values[table].transpose(1, 2).reshape(n, kv_heads, length, -1)
    return torch.matmul(weights.view(n, kv_heads, -1, length), past_values).view(
        n, query.shape[0], -1
    )


def register() -> None:
    """Make `attend` known to transformers under NAME."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
