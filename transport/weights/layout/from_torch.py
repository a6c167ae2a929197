"""Layouts of torch models, from the placements of their DTensors.

Each rank knows its mesh and its placements, so that it knows the layout of all ranks without asking
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from transport.weights.errors import LayoutMismatch
from transport.weights.layout.layout import Layout, Mesh, Shards, TensorLayout


def layout_of(
    tensors: torch.nn.Module | Mapping[str, torch.Tensor], ranks: Sequence[int]
) -> Layout:
    """The layout of all ranks, from the tensors of this one.

    DTensors: by their meshes and placements; their ranks are those of the process group, and ranks
    outside of the mesh hold nothing that this one knows of. Other tensors: `ranks` hold each whole.
    One tensor of several names (tied ones) travels under its first. LayoutMismatch for Partial
    placements.
    """
    if isinstance(tensors, torch.nn.Module):
        tensors = dict(tensors.named_parameters(remove_duplicate=False))
    layouts: dict[str, TensorLayout] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    everyone = Mesh((len(ranks),), tuple(ranks))
    for name, tensor in tensors.items():
        travels = first.setdefault(_memory(tensor), name)
        if travels != name:
            aliases[name] = travels
            continue
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        shards = (
            _placed(name, tensor)
            if isinstance(tensor, DTensor)
            else Shards.cut(shape, everyone, (None,))
        )
        layouts[name] = TensorLayout(name=name, shape=shape, dtype=dtype, shards=shards, into=name)
    return Layout(tensors=layouts, aliases=aliases)


def local(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What this rank holds of each."""
    return {name: _local(tensor.detach()) for name, tensor in tensors.items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _memory(tensor: torch.Tensor) -> Any:
    """Equal for two names of one tensor."""
    own = _local(tensor)
    if own.is_meta or not own.numel():
        return id(tensor)
    return own.data_ptr(), own.device, own.dtype, own.stride(), tensor.shape


def _placed(name: str, tensor: DTensor) -> Shards:
    mesh = tensor.device_mesh
    sizes = tuple(mesh.shape)
    cuts: list[int | None] = []
    for placement in tensor.placements:
        dim, whole = getattr(placement, "dim", None), isinstance(placement, Replicate)
        if isinstance(placement, Partial) or (dim is None and not whole):
            raise LayoutMismatch(
                f"tensor '{name}' has no slice that a rank could send; found placement {placement};"
                " redistribute it to Shard or Replicate first"
            )
        cuts.append(None if dim is None else dim % tensor.ndim)
    order, parts = _order(tensor.placements, cuts, sizes)
    ranks = Mesh(sizes, tuple(mesh.mesh.flatten().tolist()))
    return Shards.cut(tuple(tensor.shape), ranks, tuple(cuts), order, parts)


def _order(
    placements: Sequence[Any], cuts: Sequence[int | None], sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """In which order the mesh dimensions cut, and into how many parts each of them deals.

    FSDP2 cuts what later mesh dimensions (tensor or expert parallel) have left of a dimension, and
    tells so by a `_StridedShard` whose split factor is the number of their pieces. Any other factor
    tells of packed parts.
    """
    order: list[int] = []
    parts = [1] * len(sizes)
    for axis in reversed(range(len(sizes))):
        factor = getattr(placements[axis], "split_factor", 1)
        later = 1
        for next_axis in range(axis + 1, len(sizes)):
            later *= sizes[next_axis] if cuts[next_axis] == cuts[axis] else 1
        if factor > 1 and factor == later:
            order.append(axis)
        else:
            order.insert(0, axis)
            parts[axis] = factor
    return tuple(order), tuple(parts)
