"""The repeated blocks of a model of transformers."""

from __future__ import annotations

from typing import Any

import torch

from operators.models.folders import ModelError


def decoder_layers(module: Any) -> list[torch.nn.Module]:
    """The repeated blocks of a model of transformers. ModelError where it marks none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[torch.nn.Module] = [
        layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ModelError(
            f"{type(module).__name__} has no layers that can be switched one by one; found no"
            " GradientCheckpointingLayer of transformers; leave gradient_checkpointing and"
            " compile out"
        )
    return layers
