"""AdamW over named parameters, and its state as plain tensors; imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dataflow.errors import RunError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def adamw(
    parameters: Mapping[str, Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """AdamW in its fused form; weight decay is kept from vectors (norms, biases)."""
    trained = [weight for weight in parameters.values() if weight.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in trained if weight.ndim >= 2], "weight_decay": weight_decay},
        {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=True)


def state_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimiser's state as <parameter>/<moment>, on the CPU; empty before its first step."""
    found = {}
    for name, weight in parameters.items():
        state = optimizer.state.get(weight, {})
        for moment in MOMENTS:
            if moment in state:
                found[f"{name}/{moment}"] = state[moment].detach().cpu().contiguous()
    return found


def load_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Put back what `state_tensors` gave. RunError when it is of another model."""
    if not tensors:
        return
    for name, weight in parameters.items():
        if not weight.requires_grad:
            continue
        state = {}
        for moment in MOMENTS:
            saved = tensors.get(f"{name}/{moment}")
            if saved is None or (moment != "step" and saved.shape != weight.shape):
                raise RunError(
                    f"the saved optimiser state does not fit parameter '{name}' {list(weight.shape)}; found "
                    f"{None if saved is None else list(saved.shape)} for '{moment}'; "
                    f"resume with the model of the checkpoint"
                )
            state[moment] = saved.to(weight.device).clone()
        optimizer.state[weight] = state
