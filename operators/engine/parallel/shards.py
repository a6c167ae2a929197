"""Cuts a model into the slices of its ranks by the plan that transformers has for its family.

The plan (`model.tp_plan`: the config's `base_model_tp_plan` and the class's `_tp_plan`) says what is cut by rows or
columns and what stays whole; transformers' hooks add up or gather what the slices give. Which part of a full tensor a
rank holds is asked of DTensor, so there is no second set of rules. Logits are gathered, not added: every rank receives
the same bytes, and draws the same tokens from them. A model is cut after it was read: reading slices only
(`from_pretrained(distributed_config=...)`) would need accelerate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from operators.engine.precision.intake import SCALE
from operators.models.errors import ModelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp_replicate", "fsdp", "tp")
"""Dimensions that transformers expects of a mesh."""


@dataclass(frozen=True)
class TensorSlice:
    """Which part of a full tensor a rank holds."""

    dim: int | None
    """Dimension along which it is cut; None: it holds the whole."""
    runs: tuple[tuple[int, int], ...] = ()
    """Ranges [first, last) along `dim`, end to end in the slice (a fused weight has a range for each of its parts)."""

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
    """Contiguous, and what the model computes with: its memory may be exchanged for another, by `local.data`."""
    shape: tuple[int, ...]
    """Of the full tensor."""
    piece: TensorSlice

    @property
    def cuts_rows(self) -> bool:
        """Whether it holds parts of rows (the last dimension)."""
        return self.piece.dim == len(self.shape) - 1 > 0


def check_divides(model: Any, size: int, name: str) -> None:
    """Refuse a model that has no plan, or whose heads cannot be dealt out evenly. Raises ModelError."""
    config = model.config.get_text_config()
    if not getattr(model, "tp_plan", None):
        raise ModelError(
            f"model '{name}' cannot be generated with on {size} ranks: transformers has no tensor-parallel plan for "
            f"{type(model).__name__}; use tensor_parallel=1, or a family with base_model_tp_plan in its config "
            f"(Llama, Qwen2, Qwen3, Mistral, Gemma, Mixtral and others)"
        )
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if heads % size or kv_heads % size:
        fitting = " or ".join(str(n) for n in range(1, kv_heads + 1) if not heads % n and not kv_heads % n)
        raise ModelError(
            f"model '{name}' cannot be dealt out to {size} ranks: it has {heads} attention heads and {kv_heads} "
            f"key/value heads, and {size} does not divide both; use tensor_parallel={fitting}"
        )


def distribute(model: Any, mesh: DeviceMesh, device: torch.device) -> dict[str, Shard]:
    """Leave in `model` only this rank's slices, on `device`; its parameters by name.

    mesh: as `group.join` makes it. Names and full shapes are those that the model had.
    """
    from transformers import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    names = [name for name, _ in model.named_parameters()]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is embedding.weight
    if tied:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    size = mesh.size()
    model.maybe_distribute_model(model, DistributedConfig(tp_size=size), TransformersDeviceMesh(mesh, mesh))
    if tied:
        model.tie_weights()
    shards = {name: _shard(model, name, keep=(head, embedding), device=device) for name in names}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return shards


def _shard(model: nn.Module, name: str, *, keep: tuple[nn.Module, ...], device: torch.device) -> Shard:
    """Describe one parameter, and turn it into a plain local tensor.

    The ends of the model stay DTensors: the embedding's hook computes with one, and the head's tells its full shape.
    Elsewhere a plain tensor saves wrapping and unwrapping in every layer of every step.
    """
    where, _, leaf = name.rpartition(".")
    module = model.get_submodule(where)
    parameter = module._parameters[leaf]
    assert parameter is not None
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        parameter.data = parameter.data.to(device).contiguous()
        return Shard(parameter, shape, TensorSlice(None))
    local = nn.Parameter(parameter.to_local().detach(), requires_grad=False)
    if module in keep:
        parameter._local_tensor = local
    else:
        module._parameters[leaf] = local
    return Shard(local, shape, _piece(parameter))


def connect(model: Any, mesh: DeviceMesh, paths: Collection[str]) -> None:
    """Give layers that were put in the place of others at these paths the hooks that `distribute` gave those."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan, *_ = model._resolve_parallel_plans(model.config.distributed_config)
    apply_tensor_parallelism(model, mesh["tp"], {path: plan[path] for path in paths if path in plan})


def cut_rows(shards: Mapping[str, Shard]) -> frozenset[str]:
    """The parameters of whose rows (the last dimension) a rank holds parts."""
    return frozenset(name for name, shard in shards.items() if shard.cuts_rows)


def taken(shards: Mapping[str, Shard], tensors: Mapping[str, torch.Tensor]) -> dict[str, Shard]:
    """What a rank takes of each version, where it goes into these tensors: those of its parameters that are quantised
    are others than before, and may have scales, which are of whole rows."""
    found: dict[str, Shard] = {}
    for name, shard in shards.items():
        into, scale = tensors[name], tensors.get(name + SCALE)
        found[name] = shard if isinstance(into, DTensor) else replace(shard, local=into)
        if scale is not None:
            piece = TensorSlice(None) if shard.cuts_rows else shard.piece
            found[name + SCALE] = Shard(scale, (*shard.shape[:-1], 1), piece)
    return found


def _piece(parameter: DTensor) -> TensorSlice:
    """Which part of it this rank holds, by cutting a tensor of indices in the same way."""
    (placement,) = parameter.placements
    dim = getattr(placement, "dim", None)
    if dim is None:
        return TensorSlice(None)
    dim %= parameter.ndim
    shape = [1] * parameter.ndim
    shape[dim] = parameter.shape[dim]
    index = torch.arange(shape[dim]).view(shape)
    mine = distribute_tensor(index, parameter.device_mesh, [placement], src_data_rank=None).to_local()
    return TensorSlice(dim, runs_of(mine.flatten().tolist()))


def runs_of(index: list[int]) -> tuple[tuple[int, int], ...]:
    """Indices as ranges [first, last) of neighbours."""
    runs: list[tuple[int, int]] = []
    for at in index:
        if runs and runs[-1][1] == at:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return tuple(runs)


def plain_pieces(shards: Mapping[str, Shard]) -> dict[str, Any]:
    """Full shape, dimension and ranges, for msgpack and for the weight plane."""
    return {
        name: [list(shard.shape), shard.piece.dim, [list(run) for run in shard.piece.runs]]
        for name, shard in shards.items()
    }
