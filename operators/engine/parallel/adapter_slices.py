"""Adapters of a model that ranks share out: each rank takes what belongs to its slices, and merges
it into these."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dataflow.model import LoRA
from operators.engine.parallel.shards import Shard, TensorSlice
from operators.models.adapters import adapted_layers, read, tensor_names
from operators.models.merged_adapters import Merged


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
    found: dict[str, Shard] = {}
    for path, (rank, _) in layers.items():
        layer = shards[f"{path}.weight"]
        shapes = (rank, layer.shape[1]), (layer.shape[0], rank)
        for name, shape, cut in zip(tensor_names(path), shapes, (1, 0), strict=True):
            piece = layer.piece if layer.piece.dim == cut else TensorSlice(None)
            found[name] = Shard(merged.tensors[name], shape, piece)
    if folder is not None:
        whole = {name: torch.empty(shard.shape) for name, shard in found.items()}
        read(folder, whole)
        for name, shard in found.items():
            shard.local.copy_(shard.piece.of(whole[name]))
        merged.adopted()
    return merged, found
