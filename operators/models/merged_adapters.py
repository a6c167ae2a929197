"""Low-rank adapters at a reader: the model's layers hold W + scale * B @ A, computed again for each
version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from operators.models.adapters import tensor_names
from operators.models.folders import LayerAdapter


@dataclass(frozen=True)
class _Layer:
    weight: Tensor
    """Of the module: what it computes with."""
    base: Tensor
    """As it was loaded."""
    a: Tensor
    b: Tensor
    scale: float


class Merged:
    """The adapters of a plain module: `tensors` for the weight plane, `adopted` once a version is
    in them.

    Every version is computed from the weights as they were loaded, so that nothing drifts. That
    costs the adapted layers' weights a second time, in their dtype and on their device, and while
    `adopted` runs one layer in float32 twice. Sums are float32 and rounded once, to the weights'
    dtype.
    """

    def __init__(self, module: torch.nn.Module, layers: Mapping[str, LayerAdapter]) -> None:
        """`module`: loaded, plain, without gradients; its `layers`, by path, are written to in
        place.
        """
        self.tensors: dict[str, Tensor] = {}
        """A and B of each layer, float32, under the trainer's names; 0 at first."""
        self._layers: list[_Layer] = []
        for path, (rank, scale) in layers.items():
            weight = module.get_submodule(path).weight
            assert isinstance(weight, Tensor)
            outputs, inputs = weight.shape
            a = torch.zeros(rank, inputs, device=weight.device)
            b = torch.zeros(outputs, rank, device=weight.device)
            self.tensors |= dict(zip(tensor_names(path), (a, b), strict=True))
            base = weight.detach().clone()
            module.get_submodule(path).register_buffer("weight_as_loaded", base, persistent=False)
            self._layers.append(_Layer(weight, base, a, b, scale))

    @property
    def kept_bytes(self) -> int:
        """Memory of the weights as they were loaded."""
        return sum(layer.base.nbytes for layer in self._layers)

    @torch.no_grad()
    def adopted(self) -> None:
        """Bring what `tensors` hold now into the module's layers; between two of its calls."""
        for layer in self._layers:
            layer.weight.copy_(torch.addmm(layer.base.float(), layer.b, layer.a, alpha=layer.scale))
