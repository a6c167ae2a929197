"""What every rank builds alike: its slice of the model, and the engine around it."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dataflow.runtime import Context
from operators.engine.attention import default_budget
from operators.engine.build import BuiltEngine, build_native
from operators.engine.decode import Engine
from operators.engine.parallel.shards import (
    AXES,
    Shard,
    connect,
    cut_rows,
    distribute,
    sliced,
    taken,
)
from operators.engine.precision import Sliced
from operators.generator import GeneratorKnobs
from operators.ranks import group
from operators.ranks.group import leave, watched
from operators.ranks.team import Loading

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


@dataclass(frozen=True)
class RankEngine:
    """One rank's engine, and by name what it takes of each version."""

    built: BuiltEngine
    shards: dict[str, Shard]
    aside: Path | None
    """As of `Context`."""

    @property
    def engine(self) -> Engine:
        """The native engine that was built."""
        assert self.built.native is not None
        return self.built.native


def make_member(
    declaration: GeneratorKnobs, context: Context, mesh: DeviceMesh, loading: Loading
) -> RankEngine:
    """Load this rank's slices and build its engine; all ranks together, since the engine's
    self-test is a forward pass.

    Raises:
        ModelError: no plan for this family, heads that cannot be dealt out, or as `build_native`.
    """
    size = mesh.size()
    device = torch.device(context.device)
    if device.type == "cpu":
        torch.set_num_threads(context.threads)
    model = declaration.model
    own = sliced(
        model, functools.partial(distribute, mesh=mesh, device=device, name=model.name), loading
    )
    budget = declaration.cache_bytes
    if budget is None:
        free = default_budget(device, sum(shard.local.nbytes for shard in own.shards.values()))
        budget = least(free // size if device.type == "cpu" else free)
    shares = Sliced(cut_rows(own.shards), largest, functools.partial(connect, own.module, mesh))
    budgeted = dataclasses.replace(declaration, cache_bytes=budget)
    built = build_native(budgeted, context, own.module, shares, own.merged)
    return RankEngine(built, taken(own.shards, built.engine.tensors), context.aside)


def state_of(engine: Engine) -> int:
    """A checksum of the weights' version and of the live rows: whose they are, how long, and their
    newest tokens; equal on all ranks.
    """
    rows = engine.rows
    state = [
        np.array([engine.version]),
        rows.ticket[: rows.n],
        rows.lengths,
        rows.last.cpu().numpy(),
    ]
    return zlib.crc32(np.concatenate(state).astype(np.int64).tobytes())
