"""Which models the fused step computes: decoders of the Llama shape, recognised by classes and
settings.
"""

from __future__ import annotations

from typing import Any

import torch

from operators.engine.native.attention import serves
from operators.models.borders import CHANGING

FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")
"""Rotary position embeddings, RMS norms, grouped attention, gated SiLU: alike but for biases, norms
and windows."""
SILU = ("SiLUActivation", "SiLU")


def reason_against(model: torch.nn.Module) -> str | None:
    """Why the fused step cannot compute this model; None if it can."""
    kind = type(model).__name__
    family = kind.removesuffix("ForCausalLM")
    home = f"transformers.models.{family.lower()}.modeling_{family.lower()}"
    if family not in FAMILIES or type(model).__module__ != home:
        return f"{kind} is not one of {', '.join(FAMILIES)}"
    for module in model.modules():
        name = type(module).__name__
        own = type(module).__module__ == home and name.startswith(family)
        is_known = (
            type(module) in (torch.nn.Linear, torch.nn.Embedding, torch.nn.ModuleList)
            or name in SILU
        )
        if not own and not is_known:
            return f"it holds a {name}"
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"a hook or a forward of its own is set on a {name}"
    if (kind := str(model.model.rotary_emb.rope_type)) in CHANGING:  # type: ignore[union-attr]
        return f"its rotary embedding is {kind} and not settled"
    if not serves(model) or any(
        type(weight) is not torch.nn.Parameter for weight in model.parameters()
    ):
        return "its weights are not all plain float32 or all plain bfloat16 on the CPU"
    return None


def window_of(model: Any, layer: int) -> int:
    """Positions that a layer attends to, its own included; 0: all."""
    attention = model.model.layers[layer].self_attn
    if type(model).__name__ == "MistralForCausalLM":
        return int(getattr(model.config, "sliding_window", None) or 0)
    return int(getattr(attention, "sliding_window", None) or 0)
