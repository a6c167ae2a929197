"""Which part of a tensor a rank holds: asked of DTensor, so that there is no second set of
rules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from operators.models.slices import Runs, whole


def held(tensor: Any) -> Runs:
    """Of a tensor, all; of a DTensor, what this rank holds: of each dimension, ranges [first, last)
    of indices.
    """
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    return [_along(tensor, dim) for dim in range(tensor.ndim)]


def _along(tensor: DTensor, dim: int) -> list[tuple[int, int]]:
    size = tensor.shape[dim]
    of_axis = [getattr(placement, "dim", None) for placement in tensor.placements]
    cuts = [
        axis for axis, cut in enumerate(of_axis) if cut is not None and cut % tensor.ndim == dim
    ]
    if not cuts:
        return [(0, size)]
    if len(cuts) > 1:
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return [(offset[dim], offset[dim] + shape[dim])]
    (axis,), mesh = cuts, tensor.device_mesh
    if mesh.ndim > 1:
        mesh = mesh[(mesh.mesh_dim_names or ())[axis]]
    index = torch.arange(size).view([size if axis == dim else 1 for axis in range(tensor.ndim)])
    mine = distribute_tensor(index, mesh, [tensor.placements[axis]], src_data_rank=None).to_local()
    return runs_of(mine.flatten().tolist())


def runs_of(index: list[int]) -> list[tuple[int, int]]:
    """Indices as ranges [first, last) of neighbours."""
    runs: list[tuple[int, int]] = []
    for at in index:
        if runs and runs[-1][1] == at:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return runs
