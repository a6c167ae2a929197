"""AdamW over named parameters, and its state as plain tensors; imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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
        {
            "params": [weight for weight in trained if weight.ndim >= 2],
            "weight_decay": weight_decay,
        },
        {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=True
    )


def state_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The optimiser's own state as <parameter>/<moment>; empty before its first step."""
    tensors: dict[str, Tensor] = {}
    for name, weight in parameters.items():
        state = optimizer.state.get(weight, {})
        tensors |= {f"{name}/{moment}": state[moment] for moment in MOMENTS if moment in state}
    return tensors


def fresh_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Give the optimiser an empty state to fill, as after a step; returns it as `state_tensors`."""
    for weight in parameters.values():
        if weight.requires_grad:
            step = torch.zeros((), dtype=torch.float32, device=weight.device)
            moments = torch.zeros_like(weight), torch.zeros_like(weight), step
            optimizer.state[weight] = dict(zip(MOMENTS, moments, strict=True))
    return state_tensors(optimizer, parameters)
