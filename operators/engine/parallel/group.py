"""What one engine's ranks agree on through their process group, and what each of them holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from operators.engine.parallel.shards import AXES, Shard
from operators.ranks import group
from operators.ranks.group import leave, watched

__all__ = ["digests", "join", "largest", "least", "leave", "watched"]


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


def digests(shards: Mapping[str, Shard]) -> dict[str, int]:
    """A checksum (xxh3, 64 bits) of the bytes of each parameter of this rank, by name."""
    return {
        name: xxhash.xxh3_64_intdigest(
            shard.local.data.cpu().view(-1).view(torch.uint8).numpy().data
        )
        for name, shard in shards.items()
    }
