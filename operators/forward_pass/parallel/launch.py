"""Makes a forward operator that runs on several ranks, from the side of rank 0, which starts the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dataflow.node import Context
from dataflow.weight_ends import OpensWeights, WeightsBeside
from dataflow.worker.weight_ports import open_beside
from operators.engine.parallel.leader import Leader
from operators.engine.parallel.messages import Meet, Pieces
from operators.engine.parallel.shards import Shard, localize, plain_pieces
from operators.forward_pass.asked import Reading
from operators.forward_pass.knobs import ForwardKnobs
from operators.forward_pass.parallel.follow import Duties, RankForward, run_rank
from operators.forward_pass.parallel.lead import LedForward
from operators.forward_pass.parallel.messages import CODEC, Join
from operators.forward_pass.reading import reading_of
from operators.models.heads import key_value_heads
from operators.models.loading import load_configs, load_merged
from operators.ranks import group
from operators.ranks.exchange import Exchange
from operators.ranks.messages import Load, Loaded
from operators.ranks.team import Team, forked
from operators.training.parallel.launch import device_of
from operators.training.parallel.mesh import TrainerMesh, make_mesh
from operators.training.parallel.shard import cut


def led(declaration: ForwardKnobs, context: Context) -> tuple[Reading, Context]:
    """How an operator of `context.ranks` ranks asks its model, and the context with a weight plane for all of them.

    This process is rank 0; on GPUs, rank r takes the r-th after this one's. The other ranks are forks of it, as it is
    now: call this before it has used a GPU. One rank at a time holds the whole model, until it has kept its slices.

    Raises:
        ModelError: the model cannot be loaded or shared out.
        WorkerDied, DeadlineError: a rank did not start.
    """
    ranks, limits, model = context.ranks, context.limits, declaration.model
    opens = context.reader if isinstance(context.reader, OpensWeights) and context.reader.site else None
    heads = key_value_heads(load_configs(model)[0])

    def joined(rank: int, folder: Path) -> TrainerMesh:
        device = device_of(context.device, rank)
        torch.set_num_threads(context.threads)
        group.join(folder, rank, ranks, device, limits.exchange_s)
        return make_mesh(device, ranks, tensor_parallel=ranks, key_value_heads=heads)

    def loaded(rank: int, mesh: TrainerMesh) -> tuple[Reading, RankForward]:
        module, _ = load_merged(model)
        reading = reading_of(declaration, context.node, module)
        cut(module, mesh, model.name)
        shards = _localized(module, device_of(context.device, rank))
        reading.forward._device = device_of(context.device, rank)  # type: ignore[attr-defined]
        return reading, RankForward(reading.forward, shards)

    def follow(end: int, rank: int) -> int:
        def opened(own: RankForward, pieces: Sequence[Mapping[str, Any]]) -> WeightsBeside:
            assert opens is not None and opens.site is not None, "rank 0 has an end"
            device = str(device_of(context.device, rank))
            return open_beside(
                opens.site, rank, device, own.tensors, pieces, limits=limits, attempt=context.attempt
            )  # fmt: skip

        return run_rank(end, rank, Duties(
            limits, lambda folder: joined(rank, folder), lambda mesh: loaded(rank, mesh)[1], opened if opens else None,
        ))  # fmt: skip

    team = Team(context.node, ranks, forked(follow), limits, CODEC)
    with team.starting():
        team.tell(Join(str(team.folder)))
        mesh = joined(0, team.folder)
        reading, own = loaded(0, mesh)
        for rank in range(1, ranks):
            team.tell(Load(), rank)
            team.answer(rank, Loaded)
        pieces = [plain_pieces(own.shards)]
        if opens is not None:
            pieces += [dict(team.answer(rank, Pieces).pieces) for rank in range(1, ranks)]
            team.tell(Meet(tuple(pieces)))
    forward = LedForward(own.forward, own.shards, Exchange(team, group.watched(limits.exchange_s)), context.clock)
    reading.forward = forward
    reader = None if opens is None else lambda tensors: Leader(forward, opens, pieces)
    return reading, dataclasses.replace(context, reader=reader)


def _localized(module: torch.nn.Module, device: torch.device) -> dict[str, Shard]:
    """Leave plain tensors on `device` in a module that is cut; what this rank holds of each parameter."""
    shards = {name: localize(module, name, device=device) for name, _ in list(module.named_parameters())}
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            each._buffers[name] = buffer.to(device)
    return shards
