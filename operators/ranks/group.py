"""The process group of one worker's ranks: gloo between processors, NCCL between GPUs.

Within a host they meet in a private file, and gloo listens on loopback; on several hosts they meet
at rank 0's line, where only holders of the run's keys are heard, and gloo listens at the address by
which the others find each host.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dataflow.errors import RunError
from dataflow.system.rank_places import RankPlaces
from dataflow.worker.weight_ports import abort_gloo, interface_of
from operators.ranks.watch import ExchangeWatch

NEVER = datetime.timedelta(days=365)
_MEETINGS: list[Any] = []
"""Where the groups of this process have met: torch keeps no reference to a store that is written in
Python."""


def join(
    folder: Path,
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    places: RankPlaces | None = None,
) -> None:
    """Meet the other ranks in `folder` (mode 0700), or where `places` says, within `timeout_s`;
    then call `watched`.

    Raises:
        RunError: this process is in a process group already.
        WeightError: this host has no such address as `places` says.
    """
    if dist.is_initialized():
        raise RunError(
            f"rank {rank} of {size} cannot join: this process is already in a torch.distributed"
            f" process group; found one of {dist.get_world_size()} ranks; run one operator of"
            " several ranks per process"
        )
    is_spread = places is not None and bool(places.meets_at)
    os.environ["GLOO_SOCKET_IFNAME"] = interface = interface_of(
        places.address if places and is_spread else ""
    )
    # a worker's is its host's, as NCCL takes one for all groups
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=_meeting(places, timeout_s) if places and is_spread else _file(folder, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def _file(folder: Path, size: int) -> Any:
    return dist.FileStore(str(folder / "ranks"), size)  # type: ignore[attr-defined]


def _meeting(places: RankPlaces, timeout_s: float) -> Any:
    from operators.ranks.store import RankZeroStore

    assert places.keys is not None, "a run over hosts has keys"
    _MEETINGS.append(RankZeroStore(places.meets_at, places.keys, timeout_s))
    return _MEETINGS[-1]


def watched(limit_s: float) -> ExchangeWatch:
    """Bound the waits of all process groups that there are, in the place of their own time-outs,
    which run on while the run is stopped.
    """
    for process_group in _groups():
        dist.distributed_c10d._set_pg_timeout(NEVER, process_group)
    return ExchangeWatch(
        limit_s,
        _abort,
        computes=not any("cuda" in str(process_group._device_types) for process_group in _groups()),
    )


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def _abort() -> None:
    """End all that is under way, here and at the other ranks."""
    for process_group in _groups():
        for device in process_group._device_types:
            backend = process_group._get_backend(device)
            with contextlib.suppress(RuntimeError):
                if device.type == "cuda":
                    backend.abort()
                else:
                    abort_gloo(backend, process_group.rank(), process_group.size())


def leave() -> None:
    """Leave the process group, whatever state it is in.

    With it goes what DTensor has cached of its meshes: a later mesh of the same shape, here or in a
    fork, would be given this rank's place and this group. No fork could clear that, as it has none
    of the group's threads.
    """
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):
        if dist.is_initialized():
            dist.destroy_process_group()
    while _MEETINGS:
        _MEETINGS.pop().close()
    if "torch.distributed.tensor" in sys.modules:
        _forget_meshes()


def _forget_meshes() -> None:
    """As torch.distributed.tensor.debug does, whose import takes half a second; private: torch may
    rename it.
    """
    from torch.distributed.tensor import DTensor, _redistribute

    propagator = DTensor._op_dispatcher.sharding_propagator
    for cached in (
        propagator.propagate_op_sharding,
        getattr(_redistribute, "_gen_transform_infos", None),
    ):
        getattr(cached, "cache_clear", lambda: None)()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
