"""The process group of one engine's ranks: gloo between processors, NCCL between GPUs, met through a private file."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dataflow.errors import RunError
from operators.engine.parallel.shards import AXES, Piece, Shard


def join(folder: Path, rank: int, size: int, device: torch.device, timeout_s: float) -> DeviceMesh:
    """Meet the other ranks in `folder` (mode 0700), on loopback only; every later exchange ends within `timeout_s`.

    Raises:
        RunError: this process is in a process group already.
    """
    if dist.is_initialized():
        raise RunError(
            f"rank {rank} of {size} cannot join: this process is already in a torch.distributed process group; found "
            f"one of {dist.get_world_size()} ranks; run one tensor-parallel generator per process"
        )
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    for knob in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ[knob] = loopback
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(str(folder / "ranks"), size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return init_device_mesh(device.type, (1, 1, 1, size), mesh_dim_names=AXES)


def leave() -> None:
    """Leave the process group, whatever state it is in."""
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):
        if dist.is_initialized():
            dist.destroy_process_group()


def least(value: int) -> int:
    """The smallest value that any rank gives; every rank calls this."""
    agreed = torch.tensor([value])
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return int(agreed)


@torch.no_grad()
def spread(
    full: Mapping[str, torch.Tensor], shards: Mapping[str, Shard], others: Sequence[Mapping[str, Piece]]
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
