"""All of vLLM that is touched beyond its documented names, with what was tried: 0.32.0 on
processors; 0.33.0 was read. Runs in vLLM's processes alone.

vLLM's own loaders load every version, as they load a checkpoint, layer by layer; but they are given
stand-ins that have no memory, and copy from the slices that this rank has received.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from operators.engine.vllm.landing import Box, Piece, box_of, part
from operators.models.folders import ModelError

TRIED = "0.32.0 to 0.33.0"
"""Versions of vLLM."""
NAMES = {
    "vllm.distributed.weight_transfer.sharded_rdt_fake": ("FakeRDTTensor", "BakeSink"),
    "vllm.distributed.weight_transfer.sharded_rdt_engine": ("ShardedRDTWeightTransferEngine",),
    "vllm.model_executor.model_loader.reload.layerwise": (
        "initialize_layerwise_reload",
        "finalize_layerwise_reload",
    ),
    "vllm.model_executor.layers.vocab_parallel_embedding": (
        "ParallelLMHead",
        "VocabParallelEmbedding",
    ),
}
"""By module, what of it is used here."""
LORA_NAMES = {
    "vllm.lora.layers": ("LoRAMapping",),
    "vllm.lora.lora_model": ("LoRAModel",),
    "vllm.lora.lora_weights": ("LoRALayerWeights",),
    "vllm.lora.utils": ("is_moe_model", "parse_fine_tuned_lora_name"),
}
"""What of it is used for adapters, in `adapter_weights`."""
RECORDING = ("_install_recording_stamps", "_restore_after_dry_run")
"""Methods of the transfer engine."""
MULTIPLY = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""What layers compute products by."""
PROOF = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""How far a product may be from the one of the weights given, as a share of its size."""
PROCESSED = "_already_called_process_weights_after_loading"


def names(by_module: Mapping[str, tuple[str, ...]] = NAMES) -> SimpleNamespace:
    """All of these names. ModelError tells which one this vLLM does not have."""
    found: dict[str, Any] = {}
    lacking: list[str] = []
    for module, of_module in by_module.items():
        try:
            imported: Any = import_module(module)
        except ImportError as error:
            lacking.append(f"{module} ({error})")
            continue
        for name in of_module:
            found[name] = getattr(imported, name, None)
            if found[name] is None:
                lacking.append(f"{module}.{name}")
    engine = found.get("ShardedRDTWeightTransferEngine")
    lacking += [name for name in RECORDING if engine is not None and not hasattr(engine, name)]
    if lacking:
        version = import_module("vllm").__version__
        raise ModelError(
            f"engine 'vllm' takes weights by inner names of vLLM; found version {version} without"
            f" {', '.join(lacking)}; install one of {TRIED}"
        )
    return SimpleNamespace(**found)


class Slices:
    """Where a stand-in's data are."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.pieces: Mapping[str, Piece] = {}
        self.tensors: Mapping[str, torch.Tensor] = {}
        """This rank's slices, by name."""
        self._boxes: dict[tuple[str, Any], Box] = {}

    def box(self, name: str, operations: Any) -> Box:
        """What a loader sees of a tensor."""
        key = name, operations
        if key not in self._boxes:
            self._boxes[key] = box_of(self.shapes[name], operations)
        return self._boxes[key]

    def accept_copy(self, into: torch.Tensor, source: Any) -> torch.Tensor:
        """A loader copies a stand-in: from the slice, once the layer has memory."""
        if into.numel() != source.numel():
            raise NotImplementedError(f"{source._name} is spread over more than its own numbers")
        with torch._C.DisableTorchFunctionSubclass():
            if into.is_meta:  # vLLM counts it
                return into.copy_(torch.empty(source.shape, dtype=source.dtype, device="meta"))
            if not into.numel():
                return into
            return into.copy_(self.of(source._name, source._ops).reshape(into.shape))

    def of(self, name: str, operations: Any) -> torch.Tensor:
        """What a loader sees of a tensor, in this rank's slice."""
        return part(self.tensors[name], self.pieces[name], self.box(name, operations))


class ModelWeights:
    """A model of vLLM's, and what this rank takes of each version."""

    def __init__(
        self,
        model: Any,
        model_config: Any,
        device: torch.device,
        dtype: torch.dtype,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """shapes: of the trainer's tensors, by its names."""
        self._model, self._config, self._device, self.dtype = model, model_config, device, dtype
        self._names, self._shapes = names(), shapes
        self._slices = Slices(shapes)
        self._copies: dict[Any, list[Any]] = {}
        """By layer, what its loaders copied."""

    def recorded(self) -> dict[str, list[Box]]:
        """By name, the boxes that this rank's layers take. ModelError where a layer would not get
        all that it has, or a loader does more than to slice.
        """
        n, sink = self._names, self._names.BakeSink()
        engine = n.ShardedRDTWeightTransferEngine
        with torch.device(self._device):
            n.initialize_layerwise_reload(self._model)
            try:
                engine._install_recording_stamps(None, self._model, sink)
                self._load(sink)
            except NotImplementedError as error:
                raise ModelError(
                    "vLLM's loaders do more with this model's weights than to slice them, as with"
                    f" quantised ones; found: {error}; give it a model as it is trained, or use"
                    ' engine="native"'
                ) from error
            finally:
                engine._restore_after_dry_run(None, self._model)
        self._copies = {
            layer: [copy for copy in copies if 0 not in copy.shape]  # a rank beyond the vocabulary
            for layer, copies in sink.copies_by_layer.items()
        }
        boxes: dict[str, list[Box]] = defaultdict(list)
        for copies in self._copies.values():
            for copy in copies:
                name, operations = copy.src
                boxes[name].append(self._slices.box(name, operations))
        taken = {id(layer) for layer in self._copies}
        without = [
            f"{name} ({type(layer).__name__})"
            for name, layer in self._model.named_modules()
            if id(layer) not in taken
            and any(p.numel() for p in layer.parameters(recurse=False))
            and not self._shares(layer, taken)
        ]
        if without or not boxes:
            raise ModelError(
                "layers of vLLM's model would keep the weights that they have; found"
                f" {without[:3] or 'none that takes any'} without a tensor among those that the"
                ' trainer sends; use engine="native"'
            )
        return boxes

    def _shares(self, layer: Any, taken: set[int]) -> bool:
        """Whether its parameters are those of a layer that takes some, as of a tied head."""
        own = {id(p) for p in layer.parameters(recurse=False)}
        others = (m for m in self._model.modules() if id(m) in taken)
        return own <= {id(p) for m in others for p in m.parameters(recurse=False)}

    def attach(self, pieces: Mapping[str, Piece], tensors: Mapping[str, torch.Tensor]) -> None:
        """From where versions are taken."""
        self._slices.pieces, self._slices.tensors = pieces, tensors

    @torch.no_grad()
    def load(self) -> None:
        """Compute with what the tensors hold now; no step may be under way."""
        n, is_cpu = self._names, self._device.type == "cpu"
        if is_cpu:
            # On processors a mixture packs its experts only while it has no kernel.
            for module in self._model.modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None
        with torch.device(self._device):
            n.initialize_layerwise_reload(self._model)
            self._load(self._slices)
            n.finalize_layerwise_reload(self._model, self._config)
        if is_cpu:
            # A head packs its weights, and is not told when they are its embedding's, and new.
            for module in self._model.modules():
                if isinstance(module, n.ParallelLMHead):
                    if hasattr(module, PROCESSED):
                        delattr(module, PROCESSED)
                    module.quant_method.process_weights_after_loading(module)

    @torch.no_grad()
    def prove(self) -> list[str]:
        """Load noise, and see that the layers compute with it; the kinds of layers of which that
        cannot be seen from outside. ModelError names one that does not: it packs its weights, as
        vLLM's do on processors, and went on with those from before.

        No layer has the model's values afterwards, until the next `load`.
        """
        noise = torch.Generator().manual_seed(0)
        for tensor in self._slices.tensors.values():
            tensor.copy_(torch.rand(tensor.shape, generator=noise) - 0.5)
        self.load()
        unseen: set[str] = set()
        for name, layer in self._model.named_modules():
            if not any(True for _ in layer.parameters(recurse=False)):
                continue
            error = self._error(layer, noise)
            if error is None:
                unseen.add(type(layer).__name__)
            elif error > PROOF[self.dtype]:
                raise ModelError(
                    f"vLLM does not compute with the weights that it was given; found layer"
                    f" '{name}' ({type(layer).__name__}) off by {error:.2g} of its size after an"
                    f' update; use engine="native", or another version than {TRIED}'
                )
        return sorted(unseen)

    def _error(self, layer: Any, noise: torch.Generator) -> float | None:
        """How far a layer is from what it was given, as a share of that; None where that cannot be
        seen from outside.
        """
        method = type(getattr(layer, "quant_method", None)).__name__
        if method not in (*MULTIPLY, "NoneType"):
            return None
        given, errors, is_head = (
            self._given(layer),
            [0.0],
            isinstance(layer, self._names.ParallelLMHead),
        )
        looks_up = isinstance(layer, self._names.VocabParallelEmbedding) and not is_head
        weight = given.get("weight")
        if weight is None and is_head:
            weight = layer.weight.data  # its embedding's
        multiplies = weight is not None and method in MULTIPLY
        for name, kept in layer.named_parameters(recurse=False):
            full = given.get(name, weight if multiplies else None)
            if full is None or (kept.numel() < full.numel() and not multiplies):
                return None
            if kept.numel() >= full.numel():
                errors.append(distance(kept.data.flatten()[: full.numel()], full.flatten()))
        if weight is not None and multiplies and not looks_up:
            x = torch.rand((2, weight.shape[1]), generator=noise).to(weight) - 0.5
            product = layer.quant_method.apply(layer, x, None)
            errors.append(distance(product[:, : len(weight)], x @ weight.T))
        return max(errors)

    def _given(self, layer: Any) -> dict[str, torch.Tensor]:
        """The parameters of a layer as its loaders filled them, but for padding at their ends."""
        copies = self._copies.get(layer, [])
        last = {
            copy.param_name: max(
                other.offset
                + 1
                + sum((n - 1) * step for n, step in zip(other.shape, other.stride, strict=True))
                for other in copies
                if other.param_name == copy.param_name
            )
            for copy in copies
        }
        full = {name: torch.zeros(count, dtype=self.dtype) for name, count in last.items()}
        for copy in copies:
            into = full[copy.param_name].as_strided(copy.shape, copy.stride, copy.offset)
            name, operations = copy.src
            into.copy_(self._slices.of(name, operations).reshape(into.shape))
        widths = {copy.param_name: copy.stride[-2] for copy in copies if len(copy.shape) > 1}
        return {
            name: flat.view(-1, widths[name]) if name in widths else flat
            for name, flat in full.items()
        }

    def _load(self, sink: Any) -> None:
        stand_in = self._names.FakeRDTTensor
        self._model.load_weights(
            (name, stand_in(name, torch.Size(shape), self.dtype, self._device, sink=sink))
            for name, shape in self._shapes.items()
        )


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    found, expected = found.float(), expected.to(found.device).float()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
