"""Projections to fewer key/value heads than ranks: neighbouring ranks hold the same rows and add up
their gradients.

DTensor says so where the tensor-parallel ranks are a mesh of their own, heads x copies: rows are
cut over the first and replicated over the second, so that FSDP2, checkpoints and the weight plane
need to know nothing of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def share(layer: Any, ranks: DeviceMesh, by_heads: DeviceMesh) -> None:
    """Leave a linear layer the rows of this rank's head; its inputs are the same on all ranks, as
    their gradients are.

    ranks: those that compute the layer together. by_heads: the same, as `TrainerMesh.by_heads`.
    """
    for name, weight in layer.named_parameters(recurse=False):
        dealt = distribute_tensor(
            weight.detach(), by_heads, [Shard(0), Replicate()], src_data_rank=None
        )
        layer._parameters[name] = nn.Parameter(dealt, requires_grad=weight.requires_grad)
    whole = layer.forward

    def forward(inputs: Tensor) -> Tensor:
        shared = DTensor.from_local(inputs, ranks, [Replicate()], run_check=False)
        parameters = dict(layer._parameters)
        layer._parameters.update({name: _local(weight) for name, weight in parameters.items()})
        try:
            return whole(shared.to_local(grad_placements=[Partial()]))  # type: ignore[no-any-return]
        finally:
            layer._parameters.update(parameters)

    layer.forward = forward


def _local(weight: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's rows. Each rank's queries give a part of their gradient; FSDP2 adds the parts up
    over the copies."""
    return (
        weight.to_local(grad_placements=[Shard(0), Partial()])
        if isinstance(weight, DTensor)
        else weight
    )
