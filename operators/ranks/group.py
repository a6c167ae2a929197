"""The process group of one worker's ranks: gloo between processors, NCCL between GPUs, met through a private file."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from dataflow.errors import RunError


def join(folder: Path, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
    """Meet the other ranks in `folder` (mode 0700), on loopback only; every later exchange ends within `timeout_s`.

    Raises:
        RunError: this process is in a process group already.
    """
    if dist.is_initialized():
        raise RunError(
            f"rank {rank} of {size} cannot join: this process is already in a torch.distributed process group; found "
            f"one of {dist.get_world_size()} ranks; run one operator of several ranks per process"
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


def leave() -> None:
    """Leave the process group, whatever state it is in."""
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):
        if dist.is_initialized():
            dist.destroy_process_group()
