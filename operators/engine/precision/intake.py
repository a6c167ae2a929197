"""Casts or quantises a loaded decoder's weights, and takes each new version of the full ones into
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dataflow.model import Model
from operators.engine.precision.linear import (
    FORMATS,
    Format,
    Largest,
    QuantisedExperts,
    QuantisedLinear,
    Weights,
)
from operators.models.adapters import ROUTERS
from operators.models.folders import ModelError
from operators.models.loading import load_configs

FP8_CAPABILITY = (8, 9)
"""The least compute capability of a GPU that multiplies in fp8 (Ada; Hopper is 9.0)."""

SCALE = ":scale"
"""Behind a tensor's name: that of its scales, where it travels quantised."""


@dataclass
class _Staged:
    """A full tensor on its way in: where the reader puts it, and who takes it narrow."""

    tensor: torch.nn.Parameter
    empty: torch.Tensor | None
    take: Callable[[torch.Tensor], object]


class Intake:
    """Where new weights come in: full tensors by the trainer's names, which `adopted` takes over,
    or quantised ones.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], staged: list[_Staged]) -> None:
        self.tensors = tensors
        """For `WeightReader.attach`. Full: the names, shapes and dtypes of the model before; those
        that are quantised are placeholders without memory of their own, on the CPU, until the
        reader turns them into views. Quantised: in place of each of these the layer's own values,
        under its name, and scales, under that and `SCALE`."""
        self._staged = staged

    def adopted(self) -> None:
        """Quantise the tensors that the reader wrote since the last call, one by one, between two
        decode steps.

        Buffers are filled in place. Views of the reader's memory are let go, so its closing copies
        nothing. Where versions arrive quantised there is nothing to do.
        """
        for staged in self._staged:
            if staged.empty is None:
                staged.take(staged.tensor.data)
            elif staged.tensor.data_ptr() != staged.empty.data_ptr():
                staged.take(staged.tensor.data)
                staged.tensor.data = staged.empty


@dataclass(frozen=True)
class Sliced:
    """What `quantise` has to know of a model that ranks share out, of which this one holds
    slices.
    """

    cut_rows: Collection[str]
    """The parameters of whose rows (the last dimension) this rank holds parts."""
    largest: Largest
    """What the ranks agree with on the scales of these."""
    connect: Callable[[Collection[str]], None]
    """Makes the layers at these paths, which are new, exchange what those before them exchanged."""


def fault(
    weights: str, *, device: torch.device, dtype: torch.dtype, capability: tuple[int, int] | None
) -> str | None:
    """Why weights of this kind cannot be served on a device for a model of `dtype`; None if they
    can.

    On the CPU fp8 is computed in float32 with the GPU's rounding of weights and inputs, to rehearse
    a run.

    Args:
        capability: the GPU's compute capability; None on the CPU.
    """
    if weights not in FORMATS:
        return f'weights={weights!r} is not known; use "model" or one of {sorted(FORMATS)}'
    if weights != "fp8" or capability is None:
        return None
    if capability < FP8_CAPABILITY:
        return (
            f'weights="fp8" needs a GPU that multiplies in fp8, but {device} has compute capability'
            f' {capability[0]}.{capability[1]}; use weights="int8", or a GPU of'
            f" {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or more (Hopper is 9.0)"
        )
    if dtype is not torch.bfloat16:
        return (
            'weights="fp8" gives bfloat16 on a GPU, but the model is'
            f' {str(dtype).removeprefix("torch.")}; give Model(dtype="bfloat16"), or use'
            ' weights="int8"'
        )
    return None


def cast(
    model: torch.nn.Module, dtype: torch.dtype, *, adopt: Literal["view", "copy"] = "view"
) -> Intake:
    """Let `model` compute in `dtype`, and take versions in the dtype that it had. adopt: as for
    `quantise`.
    """
    tensors: dict[str, torch.Tensor] = {}
    staged = []
    for name, parameter in model.named_parameters():
        full = parameter.data
        empty = None if adopt == "copy" else torch.zeros((), dtype=full.dtype).expand(full.shape)
        parameter.data = full.to(dtype)
        place = torch.nn.Parameter(full if empty is None else empty, requires_grad=False)
        staged.append(_Staged(place, empty, parameter.data.copy_))
        tensors[name] = place
    return Intake(tensors, staged)


def quantise(
    model: torch.nn.Module,
    weights: Weights,
    *,
    adopt: Literal["view", "copy"] = "view",
    arrives_quantised: bool = False,
    sliced: Sliced | None = None,
) -> Intake:
    """Replace the weights of every linear layer, and of the experts of a mixture, by quantised
    ones.

    Embeddings, the output layer, norms, biases and the layers that choose experts keep their
    parameters. Layers that share one weight go on sharing it; a weight shared with an embedding
    stays. Experts are computed one at a time ("eager").

    Args:
        model: a loaded decoder of transformers, on its device; changed in place.
        weights: "int8" (weights only), "int8_dynamic" and "fp8" (inputs too, for each token).
        adopt: as the `WeightReader` adopts. "view" needs no memory for full weights, and a reader
            whose versions are in the model's dtype, in CPU memory; "copy" keeps a full copy for the
            reader to write into.
        arrives_quantised: versions are quantised by the trainer, each of `linear_weights(model)` as
            values and scales, and the reader puts them into the layers.
        sliced: where ranks share out the model; all of them call this together, and
            `Intake.adopted`.

    Raises:
        ModelError: the device cannot, or nothing is to be quantised.
    """
    first = next(model.parameters())
    capability = (
        torch.cuda.get_device_capability(first.device) if first.device.type == "cuda" else None
    )
    wrong = fault(weights, device=first.device, dtype=first.dtype, capability=capability)
    if wrong is None and (getattr(model, "tp_size", None) or 1) > 1 and sliced is None:
        wrong = (
            f"a model that {model.tp_size} ranks share out is quantised with sliced=, but got"
            f" {sliced=}; say how it is shared out"
        )
    if wrong is not None:
        raise ModelError(wrong)
    form = FORMATS[weights]
    layers, experts = _chosen(model)
    if not layers and not experts:
        raise ModelError(
            f"{type(model).__name__} has nothing to quantise; found no linear layer but its head;"
            ' use weights="model"'
        )
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    plan = [name for name in tensors if name in layers or name in experts]
    staged = []
    for name in plan:
        full = tensors[name]
        largest = sliced.largest if sliced is not None and name in sliced.cut_rows else None
        if name in experts:
            quantised: QuantisedLinear | QuantisedExperts = _experts(model, name, form, largest)
        else:
            quantised = _linear(model, layers[name], form, largest)
        if arrives_quantised:
            tensors[name], tensors[name + SCALE] = quantised.weight, quantised.scale
            continue
        empty = None if adopt == "copy" else torch.zeros((), dtype=full.dtype).expand(full.shape)
        place = torch.nn.Parameter(full.data if empty is None else empty, requires_grad=False)
        staged.append(_Staged(place, empty, quantised.take))
        tensors[name] = place
    if sliced is not None:
        sliced.connect([path for name in plan if name in layers for path in layers[name]])
    return Intake(tensors, staged)


def linear_weights(model: torch.nn.Module) -> frozenset[str]:
    """Names of the parameters that `quantise` replaces: of a loaded decoder, or of one on the meta
    device.
    """
    layers, experts = _chosen(model)
    return frozenset(layers) | experts


def _chosen(model: torch.nn.Module) -> tuple[dict[str, list[str]], set[str]]:
    """By parameter's name: the linear layers that hold that weight; and the names of experts'
    weights.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    output_layer = model.get_output_embeddings()  # type: ignore[operator]
    layers: dict[str, list[str]] = {}
    excluded: set[str] = set()
    experts: set[str] = set()
    for path, module in model.named_modules():
        plain = (
            type(module) is torch.nn.Linear
            and module is not output_layer
            and path.rpartition(".")[2] not in ROUTERS
        )
        mixture = hasattr(module, "is_transposed") and hasattr(module, "has_gate")
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = names[id(parameter)]
            if plain and key == "weight":
                layers.setdefault(name, []).append(path)
            elif mixture and parameter.ndim == 3:
                experts.add(name)
            else:
                excluded.add(name)
    return {name: paths for name, paths in layers.items() if name not in excluded}, experts


def _linear(
    model: torch.nn.Module, paths: list[str], form: Format, largest: Largest | None
) -> QuantisedLinear:
    """Put one quantised weight in place of the linear layers at `paths`, which share their
    weight.
    """
    quantised: list[QuantisedLinear] = []
    for path in paths:
        linear = model.get_submodule(path)
        assert isinstance(linear, torch.nn.Linear)
        layer = QuantisedLinear(linear, form, largest)
        if quantised:
            layer._buffers.update(quantised[0]._buffers)
        quantised.append(layer)
        model.set_submodule(path, layer)
    return quantised[0]


def _experts(
    model: torch.nn.Module, name: str, form: Format, largest: Largest | None
) -> QuantisedExperts:
    """Put quantised experts in place of the parameter of that name, and have them computed one at a
    time.
    """
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    layer = QuantisedExperts(getattr(module, key), form, largest)
    delattr(module, key)
    setattr(module, key, layer)
    model.set_experts_implementation("eager")  # type: ignore[operator]
    return layer


def quantized_names(model: Model) -> frozenset[str]:
    """The names that `linear_weights` gives for `model`, from its config alone. ModelError as
    `load_configs`.
    """
    from transformers import AutoModelForCausalLM

    config, _ = load_configs(model)
    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config
        return linear_weights(build(config, trust_remote_code=model.trust_remote_code))
