"""A rank's slices of a model that ranks share out, with adapters merged into them: read from files,
or cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dataflow.model import LoRA, Model
from operators.engine.parallel.shards import Shard, TensorSlice, read_slices
from operators.models.adapters import adapted_layers, read, tensor_names
from operators.models.folders import base_of
from operators.models.loading import load_merged, outlined
from operators.models.merged_adapters import Merged
from operators.ranks.loading import Loading

# Adapters of a model that ranks share out: each rank takes what belongs to its slices, and merges
# it into these.


def merged_slices(
    model: Any, lora: LoRA, shards: Mapping[str, Shard], folder: Path | None
) -> tuple[Merged, dict[str, Shard]]:
    """What merges adapters into the slices that `distribute` left in `model`, and what a rank takes
    of each version.

    Where a rank has rows of a layer it takes these rows of B, where it has columns these columns of
    A, and the other one whole: its B @ A is its slice of the whole one. folder: adapters to begin
    with. Raises ModelError as `adapters.adapted_layers` and `adapters.read`.
    """
    layers = adapted_layers(model, lora, folder)
    merged = Merged(model, layers)
    merged_shards: dict[str, Shard] = {}
    for path, (rank, _) in layers.items():
        layer = shards[f"{path}.weight"]
        shapes = (rank, layer.shape[1]), (layer.shape[0], rank)
        for name, shape, cut in zip(tensor_names(path), shapes, (1, 0), strict=True):
            piece = layer.piece if layer.piece.dim == cut else TensorSlice(None)
            merged_shards[name] = Shard(merged.tensors[name], shape, piece)
    if folder is not None:
        whole = {name: torch.empty(shard.shape) for name, shard in merged_shards.items()}
        read(folder, whole)
        for name, shard in merged_shards.items():
            shard.local.copy_(shard.piece.of(whole[name]))
        merged.adopted()
    return merged, merged_shards


@dataclass(frozen=True)
class SlicedModel:
    """What a rank computes with."""

    module: Any
    """Without gradients."""
    shards: dict[str, Shard]
    """By name, what the rank takes of each version."""
    merged: Merged | None
    """Where that are adapters."""


def sliced(model: Model, cut: Callable[[Any], dict[str, Shard]], loading: Loading) -> SlicedModel:
    """This rank's slices of `model`, of which the whole is nowhere unless it has to be loaded at
    once.

    cut: leaves the slices alone in a module, on the meta device or whole. Raises ModelError as
    `load_merged` and `adapters.adapted_layers`, and what `cut` raises.
    """
    base, folder = base_of(model) if model.lora is not None else (model, None)
    outline = outlined(base)
    with loading(outline is None):
        module = load_merged(base)[0] if outline is None else outline.module.requires_grad_(False)
        shards = cut(module)
        if outline is not None:
            read_slices(base, outline, shards)
    if model.lora is None:
        return SlicedModel(module, shards, None)
    merged, adapters = merged_slices(module, model.lora, shards, folder)
    return SlicedModel(module, adapters, merged)
