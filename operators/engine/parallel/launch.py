"""Builds an engine that runs on several ranks, from the side of rank 0."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from dataflow.runtime import Context
from dataflow.system.forking import has_used_cuda
from operators.engine.build import BuiltEngine
from operators.engine.knobs import GeneratorKnobs
from operators.engine.parallel import follower, group
from operators.engine.parallel.lockstep import Lockstep
from operators.engine.parallel.member import make_member
from operators.engine.parallel.messages import CODEC, EngineSettings, Started
from operators.engine.parallel.shards import plain_pieces
from operators.ranks.exchange import Exchange
from operators.ranks.loading import leading
from operators.ranks.team import Start, Team, forked, program
from operators.ranks.weights import Leader, met, opens_for_ranks


def make_parallel(declaration: GeneratorKnobs, context: Context, size: int) -> BuiltEngine:
    """As `build_native`, on `size` ranks: this process is rank 0; on GPUs, rank r takes the r-th
    after this one's.

    Raises:
        ModelError: the model cannot be loaded or dealt out.
        WorkerDied, DeadlineError: a rank did not start.
    """
    device = torch.device(context.device)
    opens = opens_for_ranks(context.reader)
    team = Team(declaration.name, size, start_of(device, context.turn_files), context.limits, CODEC)
    with team.starting():
        for rank in range(1, size):
            team.answer(rank, Started)
        for rank in range(1, size):
            place = (
                f"cuda:{(device.index or 0) + rank}" if device.type == "cuda" else context.device
            )
            settings = EngineSettings(
                declaration=declaration,
                node=context.node,
                replica=context.rank,
                rank=rank,
                size=size,
                device=place,
                threads=context.threads,
                folder=str(team.folder),
                site=None if opens is None else opens.site,
                attempt=context.attempt,
                quantized=context.quantized,
                limits=context.limits,
                aside=None if context.aside is None else str(context.aside),
            )
            team.tell(settings, rank)
        mesh = group.join(team.folder, 0, size, device, context.limits.exchange_s)
        watch = group.watched(context.limits.exchange_s)
        with watch.within():
            member = make_member(declaration, context, mesh, leading(team, watch))
        slices = () if opens is None else met(team, plain_pieces(member.shards))
    exchange, reader = Exchange(team, watch), None
    if opens is not None:
        own = {name: shard.local for name, shard in member.shards.items()}
        reader = functools.partial(Leader, exchange, context.clock, opens, slices, own)
    return dataclasses.replace(
        member.built, engine=Lockstep(member, exchange), reader=reader, ranks=exchange
    )


def start_of(device: torch.device, keep: Sequence[int] = ()) -> Start:
    """A fork, which has imported all that this process has; a fresh interpreter where it is to use
    a GPU, or this process has used one. keep: open files for it.
    """
    if device.type == "cuda" or has_used_cuda():
        return program(follower.__name__, keep)
    return forked(lambda end, _rank: follower.main(end), keep)
