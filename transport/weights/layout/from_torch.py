"""Layouts of torch models: from the placements of their DTensors, or from a tensor-parallel plan by names.

Each rank knows its mesh and its placements, so that it knows the layout of all ranks without asking them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from transport.weights.errors import LayoutMismatch
from transport.weights.layout.layout import Held, Layout, Shape
from transport.weights.layout.shards import Mesh, Shards

Cut = tuple[int | None, int]
"""Dimension that is cut over the ranks (None: each holds the whole), and in how many parts it is dealt out."""
WHOLE: Cut = (None, 1)

STYLES: dict[str, tuple[int, int]] = {
    "colwise": (-2, 1), "packed_colwise": (-2, 2), "rowwise": (-1, 1), "packed_rowwise": (-1, 2),
    "embedding_rowwise": (0, 1), "embedding_colwise": (1, 1), "grouped_gemm": (0, 1),
}  # fmt: skip
"""How the styles of transformers' plans deal out a matrix, or a stack of them."""
LIKE = {
    "colwise_gather_output": "colwise", "colwise_rep": "colwise",
    "rowwise_split_input": "rowwise", "rowwise_rep": "rowwise",
}  # fmt: skip
"""Styles that differ from another in what they do with activations alone."""
UNCUT = frozenset({
    "all_reduce", "ep_dispatch_experts", "local_params", "mla_kv_a_proj", "moe_identity_expert", "moe_tp_experts",
    "replicate", "replicated_with_grad_allreduce", "sequence_parallel",
})  # fmt: skip
"""Styles that leave every rank the whole parameter."""


def layout_of(tensors: torch.nn.Module | Mapping[str, torch.Tensor], ranks: Sequence[int]) -> Layout:
    """The layout of all ranks, from the tensors of this one.

    DTensors: by their meshes and placements; their ranks are those of the process group, and ranks outside of the mesh
    hold nothing that this one knows of. Other tensors: `ranks` hold each whole. One tensor of several names (tied ones)
    travels under its first. LayoutMismatch for Partial placements."""
    if isinstance(tensors, torch.nn.Module):
        tensors = dict(tensors.named_parameters(remove_duplicate=False))
    held: dict[str, Held] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    everyone = Mesh((len(ranks),), tuple(ranks))
    for name, tensor in tensors.items():
        travels = first.setdefault(_memory(tensor), name)
        if travels != name:
            aliases[name] = travels
            continue
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        shards = _placed(name, tensor) if isinstance(tensor, DTensor) else Shards.cut(shape, everyone, (None,))
        held[name] = Held(name=name, shape=shape, dtype=dtype, shards=shards, into=name)
    return Layout(tensors=held, aliases=aliases)


def tensor_parallel_layout(
    tensors: Mapping[str, tuple[Shape, str]],
    plan: Mapping[str, str],
    ranks: Sequence[int],
    aliases: Mapping[str, str] | None = None,
) -> Layout:
    """The layout of a model that `ranks` cut by a plan such as transformers has for each family.

    tensors: name -> (full shape, dtype). plan: name of a parameter or of its module, `*` for any number, -> style, e.g.
    {"layers.*.self_attn.q_proj": "colwise"} (`model.tp_plan`, or the config's `base_model_tp_plan`); what it does not
    name, every rank holds whole. LayoutMismatch for an unknown style."""
    mesh = Mesh((len(ranks),), tuple(ranks))
    held = {}
    for name, (shape, dtype) in tensors.items():
        dim, parts = _cut(name, len(shape), _style(name, plan))
        shards = Shards.cut(shape, mesh, (dim,), parts=(parts,))
        held[name] = Held(name=name, shape=shape, dtype=dtype, shards=shards, into=name)
    return Layout(tensors=held, aliases=dict(aliases or {}))


def _memory(tensor: torch.Tensor) -> Any:
    """Equal for two names of one tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.is_meta or not local.numel():
        return id(tensor)
    return local.data_ptr(), local.device, local.dtype, local.stride(), tensor.shape


def _placed(name: str, tensor: DTensor) -> Shards:
    mesh = tensor.device_mesh
    sizes = tuple(mesh.shape)
    cuts: list[int | None] = []
    for placement in tensor.placements:
        dim, whole = getattr(placement, "dim", None), isinstance(placement, Replicate)
        if isinstance(placement, Partial) or (dim is None and not whole):
            raise LayoutMismatch(
                f"tensor '{name}' has no slice that a rank could send; found placement {placement}; redistribute it "
                "to Shard or Replicate first"
            )
        cuts.append(None if dim is None else dim % tensor.ndim)
    order, parts = _order(tensor.placements, cuts, sizes)
    ranks = Mesh(sizes, tuple(mesh.mesh.flatten().tolist()))
    return Shards.cut(tuple(tensor.shape), ranks, tuple(cuts), order, parts)


def _order(
    placements: Sequence[Any], cuts: Sequence[int | None], sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """In which order the mesh dimensions cut, and into how many parts each of them deals.

    FSDP2 cuts what later mesh dimensions (tensor or expert parallel) have left of a dimension, and tells so by a
    `_StridedShard` whose split factor is the number of their pieces. Any other factor tells of packed parts."""
    order: list[int] = []
    parts = [1] * len(sizes)
    for axis in reversed(range(len(sizes))):
        factor = getattr(placements[axis], "split_factor", 1)
        later = 1
        for other in range(axis + 1, len(sizes)):
            later *= sizes[other] if cuts[other] == cuts[axis] else 1
        if factor > 1 and factor == later:
            order.append(axis)
        else:
            order.insert(0, axis)
            parts[axis] = factor
    return tuple(order), tuple(parts)


def _style(name: str, plan: Mapping[str, str]) -> str:
    """The style of a parameter: its own, or its module's; keys may lack the model's prefix."""
    generic = re.sub(r"\d+", "*", name)
    for wanted in (generic, generic.rpartition(".")[0]):
        for key, style in plan.items():
            key = re.sub(r"\d+", "*", key)
            if wanted == key or wanted.endswith(f".{key}"):
                return style
    return "replicate"


def _cut(name: str, dims: int, style: str) -> Cut:
    style = LIKE.get(style, style)
    if style not in STYLES and style not in UNCUT:
        raise LayoutMismatch(
            f"the plan cuts tensor '{name}' in a way that is not known; found style '{style}'; "
            f"use one of {sorted({*STYLES, *LIKE, *UNCUT})}, or describe it by Layout.cut"
        )
    bias = style == "packed_rowwise" or (style == "rowwise" and name.endswith("bias"))
    if style in UNCUT or dims == 0 or (dims == 1 and bias):
        return WHOLE
    dim, parts = STYLES[style]
    return dim % dims, parts if dims > 1 else 1
