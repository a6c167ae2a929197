"""Makes a forward operator that runs on several ranks, from the side of rank 0, which starts the others."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from dataflow.node import Context
from dataflow.system.channel import Channel
from operators.engine.parallel.shards import localize
from operators.forward_pass.asked import Reading
from operators.forward_pass.knobs import ForwardKnobs
from operators.forward_pass.parallel.follow import follow
from operators.forward_pass.parallel.lead import LedForward
from operators.forward_pass.parallel.messages import CODEC, Join
from operators.forward_pass.reading import reading_of
from operators.models.heads import key_value_heads
from operators.models.loading import load_configs, load_merged
from operators.ranks import group
from operators.ranks.exchange import Exchange
from operators.ranks.messages import Load, Loaded
from operators.ranks.process import run_rank
from operators.ranks.team import Team, forked
from operators.training.parallel.launch import device_of
from operators.training.parallel.mesh import TrainerMesh, make_mesh
from operators.training.parallel.shard import cut


def led(declaration: ForwardKnobs, context: Context) -> Reading:
    """How an operator of `context.ranks` ranks asks its model, which is frozen.

    This process is rank 0; on GPUs, rank r takes the r-th after this one's. The other ranks are forks of it, as it is
    now: call this before it has used a GPU. One rank at a time holds the whole model, until it has kept its slices.

    Raises:
        ModelError: the model cannot be loaded or shared out.
        WorkerDied, DeadlineError: a rank did not start.
    """
    ranks, limits, model = context.ranks, context.limits, declaration.model
    heads = key_value_heads(load_configs(model)[0])

    def joined(rank: int, folder: Path) -> TrainerMesh:
        device = device_of(context.device, rank)
        torch.set_num_threads(context.threads)
        group.join(folder, rank, ranks, device, limits.exchange_s)
        return make_mesh(device, ranks, tensor_parallel=ranks, key_value_heads=heads)

    def loaded(rank: int, mesh: TrainerMesh) -> Reading:
        module, _ = load_merged(model)
        reading = reading_of(declaration, context.node, module)
        cut(module, mesh, model.name)
        _localize(module, device_of(context.device, rank))
        reading.forward._device = device_of(context.device, rank)  # type: ignore[attr-defined]
        return reading

    def main(end: int, rank: int) -> int:
        def work(channel: Channel[Any]) -> None:
            meet = functools.partial(joined, rank)
            follow(channel, rank, limits.exchange_s, meet, lambda mesh: loaded(rank, mesh).forward)

        return run_rank(end, CODEC, limits.exchange_s, work)

    team = Team(context.node, ranks, forked(main, context.turn_files), limits, CODEC)
    with team.starting():
        team.tell(Join(str(team.folder)))
        mesh = joined(0, team.folder)
        reading = loaded(0, mesh)
        for rank in range(1, ranks):
            team.tell(Load(), rank)
            team.answer(rank, Loaded)
    reading.forward = LedForward(reading.forward, Exchange(team, group.watched(limits.exchange_s)))
    return reading


def _localize(module: torch.nn.Module, device: torch.device) -> None:
    """Leave plain tensors on `device` in a module that is cut."""
    for name, _ in list(module.named_parameters()):
        localize(module, name, device=device)
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            each._buffers[name] = buffer.to(device)
