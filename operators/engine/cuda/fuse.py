"""Fuses what stands between the matrix products of a model's layers, by torch.compile, layer by
layer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from operators.engine.attention import NAME, attend
from operators.models.loading import decoder_layers


def fuse_layers(model: torch.nn.Module) -> int:
    """Compile each decoder layer of a model that `build.adapt` has switched; how many there
    are.

    Layers of one kind share their code, which is made for any number of tokens when first called.
    Attention stays outside of it. Parameters, their names and their places stay as they are.

    Raises:
        ModelError: the model has no layers of transformers' kind.
    """
    from transformers import AttentionInterface

    layers = decoder_layers(model)
    AttentionInterface.register(NAME, _outside())
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)


@functools.cache
def _outside() -> Any:
    return torch.compiler.disable(attend, reason="attention over pages is a kernel of its own")  # type: ignore[no-untyped-call]
