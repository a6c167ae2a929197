"""Cuts a model into the slices of its ranks by the plan that transformers has for its family.

The plan (`model.tp_plan`: the config's `base_model_tp_plan` and the class's `_tp_plan`) says what
is cut by rows or columns and what stays whole; transformers' hooks add up or gather what the slices
give. Which part of a full tensor a rank holds is asked of DTensor, so there is no second set of
rules; but for keys and values of fewer heads than ranks, which `models.heads` deals out. Logits are
gathered, not added: every rank receives the same bytes, and draws the same tokens from them. A
model is cut on the meta device and then reads its slices, or after it was read, where it has to be
loaded at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dataflow.model import LoRA, Model
from operators.engine.precision.intake import SCALE
from operators.models.adapters import Merged, adapted_layers, read, tensor_names
from operators.models.folders import base_of
from operators.models.heads import heads_of, place_of, settle_groups, shared_places
from operators.models.loading import fill, load_merged, outlined
from operators.models.slices import Runs, held, whole
from operators.ranks.team import Loading

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from operators.models.slices import Outline

AXES = ("pp", "dp_replicate", "fsdp", "tp")
"""Dimensions that transformers expects of a mesh."""


@dataclass(frozen=True)
class TensorSlice:
    """Which part of a full tensor a rank holds."""

    dim: int | None
    """Dimension along which it is cut; None: it holds the whole."""
    runs: tuple[tuple[int, int], ...] = ()
    """Ranges [first, last) along `dim`, end to end in the slice (a fused weight has a range for
    each of its parts)."""

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """The slice of a full tensor; a view where it is one range."""
        if self.dim is None:
            return full
        parts = [full.narrow(self.dim, first, last - first) for first, last in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


@dataclass(frozen=True, eq=False)
class Shard:
    """One parameter of this rank."""

    local: torch.Tensor
    """Contiguous, and what the model computes with: its memory may be exchanged for another, by
    `local.data`."""
    shape: tuple[int, ...]
    """Of the full tensor."""
    piece: TensorSlice

    @property
    def runs(self) -> Runs:
        """The same, of each dimension."""
        return [
            self.piece.runs if dim == self.piece.dim else [(0, size)]
            for dim, size in enumerate(self.shape)
        ]

    @property
    def cuts_rows(self) -> bool:
        """Whether it holds parts of rows (the last dimension)."""
        return self.piece.dim == len(self.shape) - 1 > 0


def distribute(model: Any, mesh: DeviceMesh, device: torch.device, name: str) -> dict[str, Shard]:
    """Leave in `model`, called `name`, only this rank's slices, on `device`. Returns its parameters
    by name.

    mesh: as `group.join` makes it. Names and full shapes are those that the model had. Raises
    ModelError as `heads_of`.
    """
    from transformers import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    heads = heads_of(model, mesh.size(), name)
    shared = shared_places(model.tp_plan) if heads.copies > 1 else []
    names = [at for at, _ in model.named_parameters()]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is embedding.weight
    if tied:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    config = DistributedConfig(
        tp_size=heads.ranks, tp_plan=dict.fromkeys(shared, "replicate") or None
    )
    model.maybe_distribute_model(model, config, TransformersDeviceMesh(mesh, mesh))
    if tied:
        model.tie_weights()
    rows = {
        at: TensorSlice(0, (heads.rows(len(weight), mesh.get_local_rank("tp")),))
        for at, weight in model.named_parameters()
        if place_of(at).rpartition(".")[0] in shared
    }
    shards = {
        at: localize(model, at, rows.get(at), keep=(head, embedding), device=device) for at in names
    }
    if tied:
        model.tie_weights()
    move_buffers(model, device)
    settle_groups(model, heads)
    return shards


def localized(model: nn.Module, device: torch.device) -> dict[str, Shard]:
    """Turn all parameters of a model that is cut into plain local tensors, as `localize`; its
    parameters by name.

    What several layers share they still share: it arrives once, and all of them compute with it.
    """
    shards: dict[str, Shard] = {}
    first: dict[int, str] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        first_name = first.setdefault(id(parameter), name)
        if first_name == name:
            shards[name] = localize(model, name, device=device)
        else:
            where, _, leaf = name.rpartition(".")
            model.get_submodule(where)._parameters[leaf] = model.get_parameter(first_name)
    move_buffers(model, device)
    return shards


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """To the device, each in its place."""
    for module in model.modules():
        for at, buffer in module.named_buffers(recurse=False):
            module._buffers[at] = buffer.to(device)


def read_slices(model: Model, outline: Outline, shards: Mapping[str, Shard]) -> None:
    """Read what was cut on the meta device, these shards, from the model's files. ModelError where
    one cannot be read.
    """
    fill(
        model,
        outline,
        {
            name: (shards[name].local.data, shards[name].runs)
            if name in shards
            else _whole_buffer(outline.module, name)
            for name in outline.names
        },
    )


def _whole_buffer(module: Any, name: str) -> tuple[torch.Tensor, Runs]:
    buffer: torch.Tensor = module.get_buffer(name)
    return buffer, whole(buffer.shape)


def localize(
    model: nn.Module,
    name: str,
    rows: TensorSlice | None = None,
    *,
    keep: tuple[nn.Module, ...] = (),
    device: torch.device,
) -> Shard:
    """Describe one parameter, and turn it into a plain local tensor, without values where it was on
    the meta device; of one that transformers left whole, `rows`.

    Those of `keep`, where the ends of the model are cut, stay DTensors: the embedding's hook
    computes with one, and the head's tells its full shape.
    Elsewhere a plain tensor saves wrapping and unwrapping in every layer of every step.
    """
    where, _, leaf = name.rpartition(".")
    module = model.get_submodule(where)
    parameter = module._parameters[leaf]
    assert parameter is not None
    shape = tuple(parameter.shape)
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if rows is not None:
        part = rows.of(part).clone()
    own_part = (
        torch.empty_like(part, device=device)
        if part.is_meta
        else part.detach().to(device).contiguous()
    )
    local = registered = nn.Parameter(own_part, requires_grad=False)
    if isinstance(parameter, DTensor) and module in keep:
        wrapped: Any = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        wrapped._local_tensor = local
        registered = nn.Parameter(wrapped, requires_grad=False)
        registered._local_tensor = local  # type: ignore[attr-defined]
    module._parameters[leaf] = registered
    if rows is not None:
        return Shard(local, shape, rows)
    return Shard(local, shape, _piece(parameter))


def connect(model: Any, mesh: DeviceMesh, paths: Collection[str]) -> None:
    """Give layers that were put in the place of others at these paths the hooks that `distribute`
    gave those.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan, *_ = model._resolve_parallel_plans(model.config.distributed_config)
    apply_tensor_parallelism(
        model, mesh["tp"], {path: plan[path] for path in paths if path in plan}
    )


def cut_rows(shards: Mapping[str, Shard]) -> frozenset[str]:
    """The parameters of whose rows (the last dimension) a rank holds parts."""
    return frozenset(name for name, shard in shards.items() if shard.cuts_rows)


def taken(shards: Mapping[str, Shard], tensors: Mapping[str, torch.Tensor]) -> dict[str, Shard]:
    """What a rank takes of each version, where it goes into these tensors: those of its parameters
    that are quantised are others than before, and may have scales, which are of whole rows.
    """
    slices: dict[str, Shard] = {}
    for name, shard in shards.items():
        into, scale = tensors[name], tensors.get(name + SCALE)
        slices[name] = shard if isinstance(into, DTensor) else replace(shard, local=into)
        if scale is not None:
            piece = TensorSlice(None) if shard.cuts_rows else shard.piece
            slices[name + SCALE] = Shard(scale, (*shard.shape[:-1], 1), piece)
    return slices


def _piece(parameter: nn.Parameter) -> TensorSlice:
    """Which part of it this rank holds."""
    cut = [
        (dim, runs)
        for dim, runs in enumerate(held(parameter))
        if list(runs) != [(0, parameter.shape[dim])]
    ]
    if not cut:
        return TensorSlice(None)
    ((dim, runs),) = cut
    return TensorSlice(dim, tuple(runs))


def plain_pieces(shards: Mapping[str, Shard]) -> dict[str, Any]:
    """Full shape, dimension and ranges, for msgpack and for the weight plane."""
    return {
        name: [list(shard.shape), shard.piece.dim, [list(run) for run in shard.piece.runs]]
        for name, shard in shards.items()
    }


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
