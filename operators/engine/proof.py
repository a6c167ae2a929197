"""Proves, once, that a model decodes from slots as it does by itself: a few tokens both ways."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from operators.engine import attention, native
from operators.engine.attention import Layout, NewPrompts
from operators.engine.kv_cache import KVCache
from operators.models import ModelError

TOKENS = 6
"""Half of them as a prompt, the others decoded one by one."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference between logits, relative to the largest logit."""


@torch.inference_mode()
def adapt(model: torch.nn.Module, name: str) -> Callable[..., None] | None:
    """Switch `model` to slot attention and prove it on a short sequence, before trained weights reach it.

    Returns the C kernel where it serves this model and gives the same logits, for the Engine; else None.

    Raises:
        ModelError: it does not use transformers' attention interface, keeps state beside keys and values, or
            gives other logits from slots.
    """
    attention.register()
    device = next(model.parameters()).device
    vocabulary = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary, TOKENS)).to(device)
    expected = model(input_ids=ids[None], use_cache=False).logits[0].float()
    model.set_attn_implementation(attention.NAME)  # type: ignore[operator]
    try:
        found = _from_slots(model, ids, None)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"model '{name}' cannot generate from slots: {type(error).__name__}: {error}; "
            f"use a decoder of transformers whose layers attend through its attention interface"
        ) from error
    allowed = TOLERANCE.get(next(model.parameters()).dtype, 1e-3)
    worst = _difference(found, expected)
    if not worst <= allowed and torch.isfinite(expected).all():
        raise ModelError(
            f"model '{name}' cannot generate from slots: its logits differ by {worst:.2g} (relative) from "
            f"its own forward pass, more than {allowed}; use a decoder whose only state is keys and values"
        )
    kernel = native.kernel() if native.serves(model) else None
    if kernel is None:
        return None
    try:
        agrees = _difference(_from_slots(model, ids, kernel), expected) <= allowed
    except ModelError:
        return None
    return kernel if agrees else None


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest of `expected`."""
    return float((found.float() - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def _from_slots(model: torch.nn.Module, ids: torch.Tensor, kernel: Callable[..., None] | None) -> torch.Tensor:
    """Logits [TOKENS, V] of the sequence, the first half in one pass and the rest from a slot."""
    cache = KVCache(1, len(ids), len(ids))
    half = len(ids) // 2
    at = torch.arange(half, device=ids.device)
    slot = at[:1]
    new = NewPrompts(padded=at[None], packed=at, slots=slot, origin=slot)
    layouts = [(Layout(cache, at[:0], 0, new), at)]
    for place in range(half, len(ids)):
        here = torch.tensor([place], device=ids.device)
        layouts.append((Layout(cache, here, place + 1, None, kernel, slot), here))
    logits = [
        model(input_ids=ids[None, at], position_ids=at[None], use_cache=False, slot_layout=layout).logits[0]
        for layout, at in layouts
    ]
    if not cache.layers:
        raise ModelError(
            f"{type(model).__name__} cannot generate from slots: none of its layers called the attention "
            f"interface of transformers; use a decoder that does"
        )
    return torch.cat(logits)
