"""What one engine's ranks exchange through their process group: slices of the weights, numbers to agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from operators.engine.parallel.shards import AXES, Shard, TensorSlice
from operators.ranks import group
from operators.ranks.group import leave, watched

__all__ = ["digests", "join", "largest", "least", "leave", "receive", "spread", "watched"]


def join(folder: Path, rank: int, size: int, device: torch.device, timeout_s: float) -> DeviceMesh:
    """As `ranks.group.join`; the mesh of all ranks, as transformers expects it."""
    group.join(folder, rank, size, device, timeout_s)
    return init_device_mesh(device.type, (1, 1, 1, size), mesh_dim_names=AXES)


def least(value: int) -> int:
    """The smallest value that any rank gives; every rank calls this."""
    agreed = torch.tensor([value])
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return int(agreed)


def largest(numbers: torch.Tensor) -> None:
    """Replace each number by the largest that any rank has in its place; every rank calls this."""
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)


@torch.no_grad()
def spread(
    full: Mapping[str, torch.Tensor], shards: Mapping[str, Shard], others: Sequence[Mapping[str, TensorSlice]]
) -> None:
    """Rank 0: keep its own slices of the full tensors, and send rank r + 1 those that `others[r]` names."""
    for name, shard in shards.items():
        sent = []
        for rank, pieces in enumerate(others, start=1):
            slice_ = pieces[name].of(full[name]).to(shard.local.device, shard.local.dtype).contiguous()
            sent.append((dist.isend(slice_, dst=rank), slice_))
        shard.local.copy_(shard.piece.of(full[name]))
        for work, _ in sent:
            if work is not None:
                work.wait()


@torch.no_grad()
def receive(shards: Mapping[str, Shard]) -> None:
    """Another rank: take what `spread` sends, parameter by parameter."""
    for shard in shards.values():
        dist.recv(shard.local.data, src=0)


def digests(shards: Mapping[str, Shard]) -> dict[str, int]:
    """A checksum (xxh3, 64 bits) of the bytes of each parameter of this rank, by name."""
    return {
        name: xxhash.xxh3_64_intdigest(shard.local.data.cpu().view(-1).view(torch.uint8).numpy().data)
        for name, shard in shards.items()
    }
