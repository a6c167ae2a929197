"""Attention over slots, registered with transformers: one new token per active row, and whole new prompts.

The model is called on one flattened sequence of N tokens: first the newest token of each active row, then the
new prompts, one after the other without padding. Axes: n active rows, S slots, P new prompts, L positions,
H query heads, K key/value heads, R = H / K, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from operators.engine import native
from operators.engine.kv_cache import KVCache
from operators.models import ModelError

NAME = "dataflow_slots"
"""Under which transformers knows `attend`."""

REFUSED = ("s_aux", "position_bias", "cache")
"""Arguments that change attention in ways that `attend` does not know."""


@dataclass(eq=False)
class NewPrompts:
    """Where the tokens of P new prompts stand in the sequence, and which slots get their keys and values."""

    padded: torch.Tensor
    """Index of each prompt's tokens in the sequence after the decoded ones, [P, L], clamped at its end."""
    packed: torch.Tensor
    """Index into the flattened [P * L] of each prompt token of the sequence, [sum of lengths]."""
    slots: torch.Tensor
    """Slots that share these prompts, [m]."""
    origin: torch.Tensor
    """Which prompt each of those slots starts from, [m]."""


@dataclass(eq=False)
class Layout:
    """What one forward pass holds, for attention to know; goes through the model as `slot_layout`."""

    cache: KVCache
    positions: torch.Tensor
    """Position of the newest token in each of the n active rows, [n]."""
    longest: int
    """Positions to attend to: the largest of `positions` plus one."""
    prompts: NewPrompts | None = None
    kernel: Callable[..., None] | None = None
    """The C kernel for the active rows; None: torch's operators."""
    slots: torch.Tensor | None = None
    """With a kernel: the slot of each active row, [n]. Without, rows lie in slots 0 .. n-1."""
    writes: dict[int, torch.Tensor] = field(default_factory=dict)
    """By number of heads: rows of the cache, seen as [S * K * T, D], that the new tokens go to."""
    biases: dict[int | None, torch.Tensor] = field(default_factory=dict)
    """By sliding window: 0 where a slot attends and -inf elsewhere, [n, 1, L]."""

    def rows_to_write(self, heads: int) -> torch.Tensor:
        """Cache rows of the newest token of each slot and head, [n * heads]."""
        rows = self.writes.get(heads)
        if rows is None:
            device = self.positions.device
            slot = torch.arange(len(self.positions), device=device)
            row = (slot[:, None] * heads + torch.arange(heads, device=device)) * self.cache.tokens
            rows = (row + self.positions[:, None]).flatten()
            self.writes[heads] = rows
        return rows

    def bias(self, window: int | None) -> torch.Tensor:
        """What is added to the scores of the active rows, float32 [n, 1, L]."""
        if window is not None and window >= self.longest:
            window = None
        found = self.biases.get(window)
        if found is None:
            at = torch.arange(self.longest, device=self.positions.device)
            last = self.positions[:, None, None]
            hidden = at > last if window is None else (at > last) | (at <= last - window)
            found = torch.zeros(hidden.shape, device=at.device).masked_fill_(hidden, -torch.inf)
            self.biases[window] = found
        return found


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
    slot_layout: Layout | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values into their slots and attend: query [1, H, N, D] to output [1, N, H, D].

    Raises:
        ModelError: the model asks for a kind of attention that is not known here.
    """
    if slot_layout is None or attention_mask is not None or any(rest.get(name) is not None for name in REFUSED):
        found = [name for name in REFUSED if rest.get(name) is not None] or "a mask of its own, or no slots"
        raise ModelError(
            f"{type(module).__name__} cannot generate from slots: its attention is called with {found}; "
            f"use a decoder whose attention is causal, full or with a sliding window"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    keys, values = slot_layout.cache.layer(module.layer_idx, key, value)  # type: ignore[arg-type]
    active = len(slot_layout.positions)
    parts: list[torch.Tensor] = []
    if active:
        parts.append(
            _attend_slots(slot_layout, keys, values, query, key, value, active, scale, sliding_window, softcap)
        )
    if slot_layout.prompts is not None:
        new = slot_layout.prompts
        k = key[0, :, active:][:, new.padded].transpose(0, 1)
        v = value[0, :, active:][:, new.padded].transpose(0, 1)
        keys[new.slots, :, : k.shape[2]] = k[new.origin]
        values[new.slots, :, : v.shape[2]] = v[new.origin]
        q = query[0, :, active:][:, new.padded].transpose(0, 1)
        mixed = _attend_prompts(q, k, v, scale, sliding_window, softcap)
        parts.append(mixed.transpose(1, 2).flatten(0, 1)[new.packed])
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _attend_slots(
    layout: Layout,
    keys: torch.Tensor,
    values: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    active: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One new token per active row: output [n, H, D]."""
    if layout.kernel is not None and layout.slots is not None:
        return native.decode_attention(
            layout.kernel, query[0, :, :active], key[0, :, :active], value[0, :, :active], keys, values,
            layout.slots, layout.positions, scale, window, softcap,
        )  # fmt: skip
    heads, width = key.shape[1], key.shape[3]
    rows = layout.rows_to_write(heads)
    keys.view(-1, width).index_copy_(0, rows, key[0, :, :active].transpose(0, 1).reshape(-1, width))
    values.view(-1, value.shape[3]).index_copy_(
        0, rows, value[0, :, :active].transpose(0, 1).reshape(-1, value.shape[3])
    )
    q = query[0, :, :active].transpose(0, 1).reshape(active * heads, -1, width)
    seen_keys = keys[:active].flatten(0, 1)[:, : layout.longest]
    scores = torch.bmm(q, seen_keys.transpose(1, 2)).view(active, -1, layout.longest)
    if softcap is not None:
        scores = torch.tanh(scores.float() * (scale / softcap)) * softcap
        scores = scores + layout.bias(window)
    else:
        scores = torch.add(layout.bias(window), scores, alpha=scale)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    seen_values = values[:active].flatten(0, 1)[:, : layout.longest]
    mixed = torch.bmm(weights.view(active * heads, -1, layout.longest), seen_values)
    return mixed.view(active, -1, values.shape[3])


def _attend_prompts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Causal attention inside each new prompt: [P, H, L, D]; what lies behind a prompt's end is not used."""
    length = q.shape[2]
    if softcap is None and (window is None or window >= length):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    repeats = q.shape[1] // k.shape[1]
    scores = torch.matmul(q, k.repeat_interleave(repeats, 1).transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(length, device=q.device)
    hidden = at > at[:, None]
    if window is not None:
        hidden = hidden | (at <= at[:, None] - window)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1).to(v.dtype)
    return torch.matmul(weights, v.repeat_interleave(repeats, 1))


def register() -> None:
    """Make `attend` known to transformers under NAME."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
