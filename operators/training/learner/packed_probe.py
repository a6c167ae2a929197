"""The self-test that packed attention changes no number of a model, whose own attention it then replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from operators.training.learner.packed_attention import ATTENTION, packed_attention
from operators.training.learner.packing import TokenTree, pack

PROBE_TOLERANCE = 1e-3


def switch_to_packed(module: Any, numbers: Callable[[bool], Tensor], *, must: bool) -> bool:
    """Replace the module's attention, unless its numbers for `probe` would change; whether it was replaced.

    numbers: of `probe`, packed or padded. must: raise instead (ValueError, or what the module raised).
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    was = module.config._attn_implementation
    if was == ATTENTION:
        return True
    with torch.no_grad():
        wanted = numbers(False)
        try:
            module.set_attn_implementation(ATTENTION)
            if bool(((numbers(True) - wanted).abs() <= PROBE_TOLERANCE).all()):
                return True
        except Exception:  # any refusal means the same: this architecture keeps its own attention
            if must:
                raise
    module.set_attn_implementation(was)
    if must:
        raise ValueError(f"{type(module).__name__} gives other numbers when packed")
    return False


def probe(module: Any) -> TokenTree:
    """Three rollouts that share a prefix, and one that does not."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, int(module.config.get_text_config().vocab_size), size) for size in (12, 9, 15, 7)]
    for row in rows[1:3]:
        row[:6] = rows[0][:6]
    offsets = np.r_[0, np.cumsum([len(row) for row in rows])]
    return pack(np.concatenate(rows), np.ones(int(offsets[-1]), bool), offsets)
