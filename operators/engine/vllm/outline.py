"""What a trainer sends of a model, and what vLLM is told of it before it loads: from the model's
outline alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.model import Model
from dataflow.model_files import folder_here
from operators.engine.vllm.messages import Adapters
from operators.models.adapters import adapted_layers, tensor_names
from operators.models.folders import ModelError, base_of
from operators.models.loading import load_configs, on_meta
from operators.models.slices import NoOutline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from operators.models.folders import LayerAdapter

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM can make room for in an adapter."""


@dataclass(frozen=True)
class Outlined:
    """A model as vLLM's process loads it."""

    folder: Path
    """Of whole weights, on this machine."""
    shapes: dict[str, tuple[int, ...]]
    """Of the tensors that a trainer sends, by its names."""
    vocabulary: int
    """Tokens."""
    adapters: Adapters | None
    """Where these tensors are of adapters."""


def outlined(model: Model, is_trained: bool) -> Outlined:
    """ModelError where vLLM cannot take the tensors that a trainer sends of this model."""
    base, start = base_of(model) if model.lora is not None else (model, None)
    try:
        module: Any = on_meta(base, None, None)
    except NoOutline as reason:
        if is_trained or model.lora is not None:
            raise ModelError(
                f"engine 'vllm' cannot take weights of model '{model.name}' by their names, as"
                f' {reason}; use engine="native"'
            ) from reason
        return Outlined(_folder(base), {}, load_configs(base)[0].get_text_config().vocab_size, None)
    vocabulary = int(module.get_output_embeddings().weight.shape[0])
    if model.lora is None:
        shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
        return Outlined(_folder(base), shapes, vocabulary, None)
    layers = adapted_layers(module, model.lora, start)
    shapes = {}
    for path, (rank, _) in layers.items():
        outputs, inputs = module.get_submodule(path).weight.shape
        shapes |= dict(zip(tensor_names(path), ((rank, inputs), (outputs, rank)), strict=True))
    return Outlined(_folder(base), shapes, vocabulary, _adapters(model.name, layers, start))


def _adapters(name: str, layers: Mapping[str, LayerAdapter], start: Path | None) -> Adapters:
    widest = max(layers, key=lambda path: layers[path].rank)
    room = next((rank for rank in RANKS if rank >= layers[widest].rank), None)
    if room is None:
        raise ModelError(
            f"engine 'vllm' has no room for the adapters of model '{name}'; found rank"
            f" {layers[widest].rank} at '{widest}', more than {RANKS[-1]}; give LoRA(rank=) at most"
            ' that, or use engine="native"'
        )
    return Adapters(
        layers={path: (*tensor_names(path), layer.scale) for path, layer in layers.items()},
        room=room,
        start=None if start is None else str(start.resolve()),
    )


def _folder(model: Model) -> Path:
    """Where the model's files are on this machine."""
    if (local := folder_here(model.source)) is not None:
        return local
    from transformers.utils.hub import cached_file

    config_file = cached_file(model.source, "config.json", revision=model.revision)
    return Path(str(config_file)).parent
