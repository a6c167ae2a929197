"""What every rank builds alike: its slice of the model, and the engine around it."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from dataflow.runtime import Context
from operators.engine.build import BuiltEngine, build_native
from operators.engine.decode import Engine
from operators.engine.knobs import GeneratorKnobs
from operators.engine.kv_cache import default_budget
from operators.engine.parallel import group
from operators.engine.parallel.shards import Shard, connect, cut_rows, distribute, taken
from operators.engine.parallel.sliced_model import sliced
from operators.engine.precision import Sliced
from operators.ranks.loading import Loading

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        budget = group.least(free // size if device.type == "cpu" else free)
    shares = Sliced(
        cut_rows(own.shards), group.largest, functools.partial(connect, own.module, mesh)
    )
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
