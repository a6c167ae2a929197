"""Low-rank adapters: added to a trainer's model, saved and read in peft's format, and merged
into a reader's layers; imports torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors.torch import load_file
from torch import Tensor

from dataflow.model import ALL_LINEAR, LoRA, Model
from operators.models.folders import PREFIX, LayerAdapter, ModelError, saved_layers
from operators.models.folders import WEIGHTS_FILE as WEIGHTS_FILE
from operators.models.slices import Outline, exchanged

NAME = "default"
"""What peft calls the only set of adapters."""

ROUTERS = ("gate", "router")
"""Last names of the layers that choose experts: tiny, and a rounded score sends a token to another
expert."""


def add(
    module: torch.nn.Module, lora: LoRA, base: Model, folder: Path | None = None
) -> torch.nn.Module:
    """Put adapters beside the linear layers of a loaded module, in place; class, config and calls
    stay.

    base: what the module was loaded from; `save_config` writes it down. folder: whose adapters
    these are to go on from, as its config has them. Raises ModelError where peft is not there, and
    as `adapted_layers`.
    """
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            f"model '{base.name}' has adapters (lora=), which need peft; found that it cannot be"
            f" imported ({error}); install it (pip install 'dataflow-rl[lora]'), or leave lora out"
        ) from error
    layers = adapted_layers(module, lora, folder)
    make: Any = peft.LoraConfig
    if folder is None:
        names = sorted({path.rpartition(".")[2] for path in layers})
        config = make(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=names,
            bias="none",
            task_type="CAUSAL_LM",
        )
    else:
        config = peft.LoraConfig.from_pretrained(str(folder))
    config.revision, config.inference_mode = base.revision, False
    dropout, config.lora_dropout = config.lora_dropout, 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.seed)
        module.add_adapter(config, NAME)  # type: ignore[operator]
    own = {path: layer for path, layer in module.named_modules() if is_adapted_layer(layer)}
    attached = {
        path: LayerAdapter(layer.r[NAME], layer.scaling[NAME]) for path, layer in own.items()
    }
    if attached != layers:
        wrong = sorted(
            path for path in {*attached, *layers} if attached.get(path) != layers.get(path)
        )
        raise ModelError(
            f"peft reads the adapters in {folder} otherwise than their tensors are, at {len(wrong)}"
            f" layers; found {attached.get(wrong[0])} for '{wrong[0]}', not {layers.get(wrong[0])};"
            " save them again with the peft here"
        )
    if dropout:
        structlog.get_logger().warning(
            "adapters go on without dropout", folder=str(folder), lora_dropout=dropout
        )
    config.lora_dropout = dropout
    source = Path(base.source)
    config.base_model_name_or_path = str(source.resolve()) if source.exists() else base.source
    for weight in module.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    return module.eval()


def outlined(outline: Outline, lora: LoRA, base: Model, folder: Path | None = None) -> Outline:
    """The outline of a model with adapters, whose values are those that `add` gives. Raises as
    it.
    """
    module = outline.module
    names = {id(weight): name for name, weight in module.named_parameters()}
    of_meta: dict[int, tuple[str, torch.nn.Parameter]] = {}

    def beside(weight: Tensor) -> Tensor:
        """peft puts adapters on the device of a weight, which must be one: this takes no memory
        there.
        """
        if not weight.is_meta:
            return weight
        stand_in = torch.nn.Parameter(
            torch.zeros((), dtype=weight.dtype).expand(weight.shape), weight.requires_grad
        )
        of_meta[id(stand_in)] = names[id(weight)], weight  # type: ignore[assignment]
        return stand_in

    add(exchanged(module, beside), lora, base, folder)
    values: dict[str, Tensor] = {}
    renamed: dict[str, str] = {}
    for name, weight in module.named_parameters():
        if id(weight) in of_meta:
            renamed[of_meta[id(weight)][0]] = name
        else:
            values[name] = weight.data

    def back(weight: Any) -> Any:
        if id(weight) in of_meta:
            return of_meta[id(weight)][1].requires_grad_(weight.requires_grad)
        is_adapter = isinstance(weight, torch.nn.Parameter)
        return (
            torch.nn.Parameter(weight.data.to("meta"), weight.requires_grad)
            if is_adapter
            else weight
        )

    exchanged(module, back)
    parts = {renamed.get(name, name): parts for name, parts in outline.parts.items()}
    return Outline(
        module, parts, frozenset(renamed.get(name, name) for name in outline.missing), values
    )


def adapted_layers(
    module: torch.nn.Module, lora: LoRA, folder: Path | None = None
) -> dict[str, LayerAdapter]:
    """The adapters of a plain module by the paths of their linear layers: those in `folder`, where
    one is given.

    Raises:
        ModelError: a name that no linear layer has, the output layer, a weight that two layers
            share, or adapters in the folder that are more than plain ones or at other layers than
            `lora` names.
    """
    if folder is None:
        return dict.fromkeys(_named(module, lora), LayerAdapter(lora.rank, lora.alpha / lora.rank))
    saved, linear = saved_layers(folder), _linear(module)
    expected = saved.keys() & linear if lora.targets is None else set(_named(module, lora))
    if wrong := sorted(saved.keys() ^ expected):
        raise ModelError(
            f"the adapters in {folder} are beside other layers than {type(module).__name__} has or"
            f" targets={lora.targets!r} names: {len(wrong)} layers differ; found {len(saved)} in"
            f" the folder, and not in both '{wrong[0]}'; leave targets out of LoRA(), and give the"
            " weights that they were trained on"
        )
    _check_paths(module, list(saved), lora)
    return {path: saved[path] for path in linear if path in saved}


def _linear(module: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    return {
        path: layer for path, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)
    }


def _named(module: torch.nn.Module, lora: LoRA) -> list[str]:
    head = module.get_output_embeddings()  # type: ignore[operator]
    linear = _linear(module)
    last = {path: path.rpartition(".")[2] for path in linear}
    if lora.targets in (ALL_LINEAR, None):
        names = {last[path] for path in linear if linear[path] is not head} - set(ROUTERS)
    else:
        names = set(lora.targets or ())
    chosen = [path for path in linear if last[path] in names]
    missing = sorted(names - set(last.values()))
    if missing or not chosen:
        raise ModelError(
            f"adapters are asked for at {missing or lora.targets}, but {type(module).__name__} has"
            f" no such linear layer; found {sorted(set(last.values()))}; give LoRA(targets=) some"
            " of these"
        )
    _check_paths(module, chosen, lora)
    return chosen


def _check_paths(module: torch.nn.Module, chosen: Sequence[str], lora: LoRA) -> None:
    """ModelError where one is the output layer, or where two share a weight."""
    kind, head, linear = type(module).__name__, module.get_output_embeddings(), _linear(module)  # type: ignore[operator]
    if any(linear[path] is head for path in chosen):
        raise ModelError(
            f"adapters are asked for at the output layer of {kind}, which has to stay as it is;"
            f" found targets={lora.targets!r}; leave it out"
        )
    if len({id(linear[path].weight) for path in chosen}) < len(chosen):
        raise ModelError(
            f"adapters are asked for at layers of {kind} that share a weight; found {len(chosen)}"
            f" layers with {len({id(linear[path].weight) for path in chosen})} weights; name others"
            " in LoRA(targets=)"
        )


def tensor_names(path: str) -> tuple[str, str]:
    """What the trainer calls A and B of the layer at that path."""
    return f"{path}.lora_A.{NAME}.weight", f"{path}.lora_B.{NAME}.weight"


def is_adapted_layer(layer: torch.nn.Module) -> bool:
    """Whether `add` put adapters beside this layer, which is `base_layer` in it now."""
    return NAME in getattr(layer, "lora_A", ())


def parts_cut(path: str, style: str) -> list[str]:
    """Paths within an adapted layer of what tensor parallelism cuts: W, and B by its rows as W's,
    or A by its columns.

    The other adapter is small and stays whole on every rank. Raises ModelError for a style of
    transformers' plan that cuts neither rows nor columns.
    """
    if "colwise" in style:
        return [f"{path}.base_layer", f"{path}.lora_B.{NAME}"]
    if "rowwise" in style:
        return [f"{path}.base_layer", f"{path}.lora_A.{NAME}"]
    raise ModelError(
        f"layer '{path}' has adapters (lora=), and tensor parallelism treats it as {style!r}, which"
        " cuts neither its rows nor its columns; leave it out of LoRA(targets=), or use"
        " tensor_parallel=1"
    )


def is_adapted(module: Any) -> bool:
    """Whether a module has adapters, so that they alone are written down."""
    return NAME in getattr(module, "peft_config", ())


def save_config(folder: Path, module: Any) -> None:
    """What stands beside the adapters' tensors."""
    config = copy.copy(module.peft_config[NAME])
    config.inference_mode = True
    config.save_pretrained(str(folder))


def load(folder: Path, module: torch.nn.Module) -> None:
    """Put the adapters of a folder into a module that has such. ModelError when they do not
    fit.
    """
    own = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    read(folder, own)


@torch.no_grad()
def read(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Copy a folder's adapters into tensors under the trainer's names. ModelError when they do not
    fit.
    """
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except Exception as error:  # whatever safetensors raises means the same
        raise ModelError(
            f"adapters cannot be read from {folder}: {WEIGHTS_FILE} is missing or broken ({error});"
            " give a folder that a trainer's checkpoint or peft wrote"
        ) from error
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    expected = {in_file(name): list(tensor.shape) for name, tensor in into.items()}
    if shapes != expected:
        wrong = sorted(
            name for name in {*shapes, *expected} if shapes.get(name) != expected.get(name)
        )
        raise ModelError(
            f"the adapters in {folder} do not fit the model: {len(wrong)} tensors differ; found "
            f"{shapes.get(wrong[0])} for '{wrong[0]}', not {expected.get(wrong[0])}; "
            "use the rank, targets and weights that they were trained with"
        )
    for name, tensor in into.items():
        tensor.copy_(tensors[in_file(name)])


def in_file(name: str) -> str:
    """The trainer's name of a tensor, as peft's files have it."""
    return PREFIX + name.replace(f".{NAME}.weight", ".weight")


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
