"""What every rank builds alike: its slice of the model, and the engine around it."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from dataflow.node import Context
from operators.engine.build import Built, build_native
from operators.engine.decode import Engine
from operators.engine.knobs import GeneratorKnobs
from operators.engine.kv_cache import default_budget
from operators.engine.parallel import group
from operators.engine.parallel.adapter_slices import merged_slices
from operators.engine.parallel.shards import Shard, connect, cut_rows, distribute, read_slices, taken
from operators.engine.precision import Sliced
from operators.models.folders import base_of
from operators.models.loading import load_merged, outlined

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class RankEngine:
    """One rank's engine, and by name what it takes of each version."""

    built: Built
    shards: dict[str, Shard]
    aside: Path | None
    """As of `Context`."""

    @property
    def engine(self) -> Engine:
        """The native engine that was built."""
        assert self.built.native is not None
        return self.built.native


def make_member(
    declaration: GeneratorKnobs, context: Context, mesh: DeviceMesh,
    loading: Callable[[bool], AbstractContextManager[None]],
) -> RankEngine:  # fmt: skip
    """Load this rank's slices and build its engine; all ranks together, since the engine's self-test is a forward pass.

    loading: within it this rank reads the model; given True, it alone, since it holds the whole of it for a moment. It
        ends when all ranks have read it, for which no exchange between ranks has to wait.

    Raises:
        ModelError: no plan for this family, heads that cannot be dealt out, or as `build_native`.
    """
    size = mesh.size()
    device = torch.device(context.device)
    if device.type == "cpu":
        torch.set_num_threads(context.threads)
    lora = declaration.model.lora
    base, folder = base_of(declaration.model) if lora is not None else (declaration.model, None)
    found = outlined(base)
    with loading(found is None):
        if found is None:
            model = load_merged(base)[0]
            shards = distribute(model, mesh, device, declaration.model.name)
        else:
            model = found.module
            shards = read_slices(base, found, mesh, device)
    merged = None
    if lora is not None:
        merged, shards = merged_slices(model, lora, shards, folder)
    budget = declaration.cache_bytes
    if budget is None:
        own = default_budget(device)
        budget = group.least(own // size if device.type == "cpu" else own)
    sliced = Sliced(cut_rows(shards), group.largest, functools.partial(connect, model, mesh))
    built = build_native(dataclasses.replace(declaration, cache_bytes=budget), context, model, sliced, merged)
    return RankEngine(built, taken(shards, built.engine.tensors), context.aside)


def state_of(engine: Engine) -> int:
    """A checksum of the weights' version and of the live rows: whose they are, how long, and their newest tokens; equal
    on all ranks."""
    rows = engine.rows
    state = [np.array([engine.version]), rows.ticket[: rows.n], rows.lengths, rows.last.cpu().numpy()]
    return zlib.crc32(np.concatenate(state).astype(np.int64).tobytes())
