"""Adapters beside the layers of a model of vLLM's, as this rank computes with them. Runs in vLLM's
processes alone.

The model stays as it was loaded. Each version is added to vLLM from memory in the place of the one
before, under one number, which every rollout names: no row is computed without adapters, which
vLLM 0.32 would do wrongly on processors beside rows that have some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from operators.engine.vllm.internals import LORA_NAMES, TRIED, distance, names
from operators.engine.vllm.landing import Box
from operators.models.folders import PREFIX, WEIGHTS_FILE, ModelError

NUMBER = 1
"""Of the adapters in use."""
ABSORBED = "kv_b_proj"
"""A layer whose weights multi-head latent attention multiplies into others when it loads them."""
PROOF = 2e-2
"""How far an output may be from that of the adapters given, as a share of its size; where they are
not used it is off by about its size."""


class AdapterWeights:
    """The adapters of a model of vLLM's; all of their tensors, whole, on each rank."""

    dtype = torch.float32
    """As the trainer has them."""

    def __init__(
        self,
        worker: Any,
        layers: Mapping[str, Sequence[Any]],
        shapes: Mapping[str, tuple[int, ...]],
        start: str | None,
    ) -> None:
        """layers: as `messages.Adapters`. ModelError names one that vLLM would leave out, or a
        model that it cannot compute beside adapters.
        """
        self._names, self._runner = names(LORA_NAMES), worker.model_runner
        self._manager = self._runner.lora_manager._adapter_manager
        self._computes = worker.vllm_config.lora_config.lora_dtype
        self._device = torch.device(worker.device)
        if self._device.type == "cpu" and self._names.is_moe_model(self._runner.model):
            raise ModelError(
                "vLLM computes a mixture of experts beside adapters (lora=) by kernels for GPUs"
                f" alone; found {type(self._runner.model).__name__} on processors; use"
                ' engine="native"'
            )
        self._layers, self._shapes, self._start = layers, shapes, start
        self._tensors: Mapping[str, torch.Tensor] = {}
        mapper = getattr(self._runner.model, "hf_to_vllm_mapper", None)
        mapper = mapper and mapper.get_rename_mapper()
        self._paths = {
            path: self._names.parse_fine_tuned_lora_name(f"{PREFIX}{path}.lora_A.weight", mapper)[0]
            for path in layers
        }
        """By the trainer's path, vLLM's."""
        self._parts = {
            name: self._manager.packed_modules.get(name, [name]) for name in self._manager.modules
        }
        """By vLLM's layer with adapters, the paths of what it computes at once, in their order."""
        known = {part for parts in self._parts.values() for part in parts}
        without = [path for path, found in self._paths.items() if found not in known]
        if worker.vllm_config.model_config.use_mla:
            without += [path for path in layers if path.endswith(f".{ABSORBED}")]
        if without:
            raise ModelError(
                f"vLLM puts no adapters beside {len(without)} of the layers that have some; found"
                f" '{without[0]}'; leave it out of LoRA(targets=), or use engine=\"native\""
            )

    def recorded(self) -> dict[str, list[Box]]:
        """The boxes that this rank takes: each tensor, whole."""
        return {name: [tuple((0, size) for size in shape)] for name, shape in self._shapes.items()}

    def attach(self, pieces: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """From where versions are taken."""
        self._tensors = tensors

    @torch.no_grad()
    def load(self) -> None:
        """Compute with what the tensors hold now; no step may be under way."""
        n, loras = self._names, {}
        for path, (a, b, scale) in self._layers.items():
            name, of_a = self._paths[path], self._tensors[a]
            loras[name] = n.LoRALayerWeights(
                name,
                len(of_a),
                len(of_a),
                of_a.to(self._computes, copy=True),
                (self._tensors[b] * scale).to(self._computes),
                scaling=1,
            )
        rank = max(lora.rank for lora in loras.values())
        self._manager.remove_adapter(NUMBER)
        self._manager.add_adapter(n.LoRAModel(NUMBER, rank, loras))
        self._manager.activate_adapter(NUMBER)
        if NUMBER not in self._runner.list_loras():
            raise RuntimeError("vLLM does not list the adapters that it was given")

    @torch.no_grad()
    def prove(self) -> list[str]:
        """Load noise, see that the layers compute with it, and load what the adapters begin with.
        ModelError names a layer that does not.
        """
        noise = torch.Generator().manual_seed(0)
        for a, b, scale in self._layers.values():
            for name, share in ((a, 1.0), (b, 1 / scale)):
                tensor = self._tensors[name]
                tensor.copy_((torch.rand(tensor.shape, generator=noise) - 0.5) * share)
        self.load()
        rows = (NUMBER, NUMBER)
        self._manager.set_adapter_mapping(self._names.LoRAMapping(rows, rows, is_prefill=True))
        for name, layer in self._manager.modules.items():
            if set(self._parts[name]).isdisjoint(self._paths.values()):
                continue
            error = self._error(layer, self._parts[name], noise)
            if error > PROOF:
                raise ModelError(
                    f"vLLM does not compute with the adapters that it was given; found layer"
                    f" '{name}' ({type(layer).__name__}) off by {error:.2g} of its size after an"
                    f' update; use engine="native", or another version than {TRIED}'
                )
        self._begin()
        self.load()
        return []

    def _error(self, layer: Any, parts: Sequence[str], noise: torch.Generator) -> float:
        """How far a layer is from what it was given, as a share of that."""
        by_name = {self._paths[path]: of_layer for path, of_layer in self._layers.items()}
        of_a: Any = [self._tensors[by_name[part][0]] if part in by_name else None for part in parts]
        of_b: Any = [
            self._tensors[by_name[part][1]] * by_name[part][2] if part in by_name else None
            for part in parts
        ]
        if layer.tp_size > 1:
            is_one = len(parts) == 1
            of_a = layer.slice_lora_a(of_a[0] if is_one else of_a)
            of_b = layer.slice_lora_b(of_b[0] if is_one else of_b)
            of_a, of_b = ([of_a], [of_b]) if is_one else (of_a, of_b)
        x = torch.rand((2, layer.input_size), generator=noise) - 0.5
        x = x.to(self._device, layer.base_layer.params_dtype)
        expected = layer.base_layer.quant_method.apply(layer.base_layer, x, None).float()
        ends = [sum(layer.output_slices[:count]) for count in range(len(parts) + 1)]
        for (first, last), a, b in zip(pairwise(ends), of_a, of_b, strict=True):
            if a is not None:
                expected[:, first:last] += x.float() @ a.T @ b.T
        return distance(layer.apply(x, None), expected)

    def _begin(self) -> None:
        """What the adapters begin with: those of their folder, or none."""
        found = {} if self._start is None else load_file(Path(self._start) / WEIGHTS_FILE)
        for path, (a, b, _) in self._layers.items():
            for name, kind in ((a, "lora_A"), (b, "lora_B")):
                if self._start is None:
                    self._tensors[name].zero_()
                else:
                    self._tensors[name].copy_(found[f"{PREFIX}{path}.{kind}.weight"])
