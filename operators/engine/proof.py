"""Proves, once, that a model decodes from slots as it does by itself: a few tokens both ways, logits compared."""

from __future__ import annotations

import numpy as np
import torch

from operators.engine import attention
from operators.engine.attention import Layout, NewPrompts
from operators.engine.kv_cache import KVCache
from operators.models import ModelError

TOKENS = 6
"""Half of them as a prompt, the others decoded one by one."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference between logits, relative to the largest logit."""


@torch.inference_mode()
def adapt(model: torch.nn.Module, name: str) -> None:
    """Switch `model` to slot attention and prove it on a short sequence; call before its weights are trusted.

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
        found = _from_slots(model, ids).float()
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"model '{name}' cannot be generated from with slots: {type(error).__name__}: {error}; "
            f"use a decoder of transformers whose layers attend through its attention interface"
        ) from error
    worst = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    allowed = TOLERANCE.get(next(model.parameters()).dtype, 1e-3)
    if torch.isfinite(expected).all() and not worst <= allowed:
        raise ModelError(
            f"model '{name}' cannot be generated from with slots: its logits differ by {worst:.2g} (relative) from "
            f"its own forward pass, more than {allowed}; use a decoder whose only state is keys and values"
        )


def _from_slots(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits [TOKENS, V] of the sequence, the first half in one pass and the rest from a slot."""
    cache = KVCache(1, len(ids), len(ids))
    half = len(ids) // 2
    at = torch.arange(half, device=ids.device)
    new = NewPrompts(padded=at[None], packed=at, slots=at[:1], origin=at[:1])
    layouts = [(Layout(cache, at[:0], 0, new), at)]
    for place in range(half, len(ids)):
        here = torch.tensor([place], device=ids.device)
        layouts.append((Layout(cache, here, place + 1), here))
    logits = [
        model(input_ids=ids[None, at], position_ids=at[None], use_cache=False, slots=layout).logits[0]
        for layout, at in layouts
    ]
    if not cache.layers:
        raise ModelError(
            f"{type(model).__name__} cannot be generated from with slots: none of its layers called the attention "
            f"interface of transformers; use a decoder that does"
        )
    return torch.cat(logits)
