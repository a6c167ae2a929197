"""Proves, once, that a model decodes from pages as it does by itself: a few tokens both ways."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from dataflow.records import AnyArray
from operators.engine import attention
from operators.engine.attention import AttentionLayout, Kernel
from operators.engine.cuda import available
from operators.engine.kv_cache import KVCache
from operators.engine.native import attention as native
from operators.engine.native.fused import FusedStep, supports
from operators.engine.pages import Prefix, pages_for
from operators.engine.precision import unrounded
from operators.engine.prefill import lay_out
from operators.models.errors import ModelError

TOKENS, DECODED = 35, 5
"""Of the whole, and of those after the prompt: it fills one page and begins another, and they begin a third."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference between logits, relative to the largest logit."""


@dataclass(frozen=True)
class SelfTest:
    """What was found out about a model."""

    kernel: Kernel | None
    """What attends for its decoded rows; None: torch's operators."""
    fused: FusedStep | None
    """What computes the whole model; None: its own forward pass."""
    token_bytes: int
    """Bytes of keys and values that one position takes in all layers."""


@torch.inference_mode()
def adapt(model: torch.nn.Module, name: str) -> SelfTest:
    """Switch `model` to attention over pages and prove it on a short sequence, before trained weights reach it.

    Pages and kernels are proved, not the rounding of inputs that layers may do: it is left out meanwhile.

    Raises:
        ModelError: it does not use transformers' attention interface, keeps state beside keys and values, or
            gives other logits from pages.
    """
    with unrounded(model):
        return _adapt(model, name)


def _adapt(model: torch.nn.Module, name: str) -> SelfTest:
    attention.register()
    device = next(model.parameters()).device
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    length = min(TOKENS, int(getattr(config, "max_position_embeddings", None) or TOKENS))
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, int(config.vocab_size), length)).to(device)
    expected = model(input_ids=ids[None], use_cache=False).logits[0].float()
    model.set_attn_implementation(attention.NAME)  # type: ignore[operator]
    try:
        found, token_bytes = _from_pages(model, ids, None)
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
    kernel = native_kernel(model)
    if kernel is not None:
        try:
            if not _difference(_from_pages(model, ids, kernel)[0], expected) <= allowed:
                kernel = None
        except ModelError:
            kernel = None
    return SelfTest(kernel, _proved(model, ids, expected, allowed) if kernel is not None else None, token_bytes)


def _proved(model: torch.nn.Module, ids: torch.Tensor, expected: torch.Tensor, allowed: float) -> FusedStep | None:
    """The fused step, where it knows the model and gives the same logits."""
    if not supports(model):
        return None
    fused, first = FusedStep(model), max(1, len(ids) - DECODED)
    cache, table = KVCache(pages_for(len(ids))), list(range(pages_for(len(ids))))
    prompt = Prefix(tokens=ids[:first].numpy(), cached=0, tables=[table])
    pages, none = torch.tensor([table], dtype=torch.int32), ids[:0]
    logits = [fused(none, none, cache, AttentionLayout(cache, none, 0, pages[:0]), [prompt])]
    for place in range(first, len(ids)):
        here = torch.tensor([place])
        logits.append(fused(ids[place : place + 1], here, cache, AttentionLayout(cache, here, place + 1, pages), []))
    return fused if _difference(torch.cat(logits), expected[first - 1 :]) <= allowed else None


def native_kernel(model: torch.nn.Module) -> Kernel | None:
    """What could attend for this model's decoded rows on its device, beside torch's operators."""
    on_gpu = available.attention_kernel(model)
    if on_gpu is not None:
        return on_gpu
    compiled = native.kernel() if native.serves(model) else None
    return None if compiled is None else functools.partial(native.decode_attention, compiled)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest of `expected`."""
    return float((found.float() - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def _from_pages(model: torch.nn.Module, ids: torch.Tensor, kernel: Kernel | None) -> tuple[torch.Tensor, int]:
    """Logits [tokens, V] of the sequence, its beginning in one pass and the rest from pages; bytes per position."""
    pages = list(range(pages_for(len(ids))))
    cache = KVCache(len(pages))

    def put(values: AnyArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(ids.device)

    table = put(np.array([pages], np.int32))
    prompt = ids[: max(1, len(ids) - DECODED)]
    fresh = lay_out([Prefix(tokens=prompt.cpu().numpy(), cached=0, tables=[pages])], put)
    passes = [(prompt, fresh.positions, AttentionLayout(cache, prompt[:0], 0, table[:0], new=fresh.layout))]
    ends = put(np.array([0, 1], np.int32)), put(np.zeros(1, np.int32))
    for place in range(len(prompt), len(ids)):
        here = put(np.array([place]))
        passes.append(
            (ids[place : place + 1], here, AttentionLayout(cache, here, place + 1, table, *ends, kernel=kernel))
        )
    logits = [
        model(input_ids=tokens[None], position_ids=at[None], use_cache=False, slot_layout=layout).logits[0]
        for tokens, at, layout in passes
    ]
    if not cache.layers:
        raise ModelError(
            f"{type(model).__name__} cannot generate from slots: none of its layers called the attention "
            f"interface of transformers; use a decoder that does"
        )
    return torch.cat(logits), cache.token_bytes
