"""A rank's slices of a model that ranks share out, with adapters merged into them: read from files,
or cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataflow.model import Model
from operators.engine.parallel.adapter_slices import merged_slices
from operators.engine.parallel.shards import Shard, read_slices
from operators.models.folders import base_of
from operators.models.loading import load_merged, outlined
from operators.models.merged_adapters import Merged
from operators.ranks.loading import Loading


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
    `load_merged` and `adapters.adapted_layers`, and what `cut` raises."""
    base, folder = base_of(model) if model.lora is not None else (model, None)
    found = outlined(base)
    with loading(found is None):
        module = load_merged(base)[0] if found is None else found.module.requires_grad_(False)
        shards = cut(module)
        if found is not None:
            read_slices(base, found, shards)
    if model.lora is None:
        return SlicedModel(module, shards, None)
    merged, adapters = merged_slices(module, model.lora, shards, folder)
    return SlicedModel(module, adapters, merged)
