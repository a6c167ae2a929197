"""Low-rank adapters on a reader's side: the model's own layers hold W + scale * B @ A, anew for each version."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dataflow.model import ADAPTER_CONFIG, ALL_LINEAR, LoRA, Model
from operators.models.adapters import adapted_layers, base_of, read, tensor_names
from operators.models.loading import ModelError, load_model


@dataclass(frozen=True)
class _Layer:
    weight: Tensor
    """Of the module: what it computes with."""
    base: Tensor
    """As it was loaded."""
    a: Tensor
    b: Tensor


class Merged:
    """The adapters of a plain module: `tensors` for the weight plane, `adopted` once a version is in them.

    Every version is computed from the weights as they were loaded, so that nothing drifts. That costs the adapted
    layers' weights a second time, in their dtype and on their device, and while `adopted` runs one layer in float32
    twice. Sums are float32 and rounded once, to the weights' dtype.
    """

    def __init__(self, module: torch.nn.Module, lora: LoRA) -> None:
        """`module`: loaded, plain, without gradients; its layers are written to in place. Raises as
        `adapters.adapted_layers`."""
        self.tensors: dict[str, Tensor] = {}
        """A and B of each layer, float32, under the trainer's names; 0 at first."""
        self._scale = lora.alpha / lora.rank
        self._layers: list[_Layer] = []
        for path in adapted_layers(module, lora):
            weight = module.get_submodule(path).weight
            assert isinstance(weight, Tensor)
            outputs, inputs = weight.shape
            a = torch.zeros(lora.rank, inputs, device=weight.device)
            b = torch.zeros(outputs, lora.rank, device=weight.device)
            self.tensors |= dict(zip(tensor_names(path), (a, b), strict=True))
            self._layers.append(_Layer(weight, weight.detach().clone(), a, b))

    @property
    def kept_bytes(self) -> int:
        """Memory of the weights as they were loaded."""
        return sum(layer.base.nbytes for layer in self._layers)

    @torch.no_grad()
    def adopted(self) -> None:
        """Bring what `tensors` hold now into the module's layers; between two of its calls."""
        for layer in self._layers:
            layer.weight.copy_(torch.addmm(layer.base.float(), layer.b, layer.a, alpha=self._scale))


def load_merged(
    model: Model,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    attention: str | None = None,
) -> tuple[torch.nn.Module, Merged | None]:
    """The plain module of `model`, without gradients, and where it has adapters, what brings new ones into it.

    A source that holds adapters alone is loaded as the model they were trained on with them merged in. Arguments as
    those of `load_model`.

    Raises:
        ModelError: as `load_model`, `adapters.read` and `adapters.adapted_layers`.
    """
    base, folder = base_of(model)
    module = load_model(base, device=device, dtype=dtype, attention=attention).requires_grad_(False)
    lora = model.lora or (None if folder is None else _saved(folder))
    if lora is None:
        return module, None
    merged = Merged(module, lora)
    if folder is not None:
        read(folder, merged.tensors)
        merged.adopted()
    return module, None if model.lora is None else merged


def _saved(folder: Path) -> LoRA:
    """What a folder's config says of its adapters. ModelError where they are more than plain ones."""
    config = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))
    targets = config["target_modules"]
    odd = [name for name in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "layers_to_transform",
           "modules_to_save", "fan_in_fan_out") if config.get(name)]  # fmt: skip
    if config.get("peft_type") != "LORA" or odd or not isinstance(targets, list | str):
        raise ModelError(
            f"the adapters in {folder} cannot be merged: only plain LoRA can; found {config.get('peft_type')} with "
            f"{odd or targets}; merge them with peft, and give the folder of the whole model"
        )
    names = targets if targets == ALL_LINEAR else tuple(targets)
    return LoRA(config["r"], alpha=config["lora_alpha"], targets=names)
