"""Builds an engine that runs on several ranks: rank 0's side, and the life of a rank behind it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dataflow.limits import Limits
from dataflow.runtime import Context
from dataflow.system.channel import Channel
from dataflow.system.forking import has_used_cuda
from operators.engine.build import BuiltEngine
from operators.engine.parallel.lockstep import CODEC, EngineSettings, Lockstep, Started, follow
from operators.engine.parallel.member import join, make_member, watched
from operators.engine.parallel.shards import plain_pieces
from operators.generator import GeneratorKnobs
from operators.ranks.team import (
    Exchange,
    Start,
    Team,
    expected,
    following,
    forked,
    leading,
    program,
    run_rank,
)
from operators.ranks.weights import Leader, beside, met, opens_for_ranks

FIRST_S = Limits().exchange_s
"""For messages before the settings have come."""


def main(end: int) -> int:
    """Run one rank over the socket of this number; the exit status."""
    with contextlib.ExitStack() as ends:
        return run_rank(end, CODEC, FIRST_S, functools.partial(_work, ends=ends))


def _work(channel: Channel[Any], ends: contextlib.ExitStack) -> None:
    channel.send(Started(os.getpid()))
    settings = expected(EngineSettings, channel, 0, os.getppid(), FIRST_S)
    ends.callback(shutil.rmtree, settings.folder, ignore_errors=True)
    _serve(channel, settings)


def _serve(channel: Channel[Any], settings: EngineSettings) -> None:
    """Join, load, build, and follow rank 0 to the end."""
    node, rank, device, wait_s = (
        settings.node,
        settings.rank,
        settings.device,
        settings.limits.exchange_s,
    )
    mesh = join(Path(settings.folder), rank, settings.size, torch.device(device), wait_s)
    watch = watched(wait_s)
    aside = None if settings.aside is None else Path(settings.aside)
    context = Context(
        node=node,
        device=device,
        threads=settings.threads,
        quantized=settings.quantized,
        aside=aside,
    )
    with watch.within():
        member = make_member(
            settings.declaration, context, mesh, following(channel, rank, wait_s, watch)
        )
    own = {name: shard.local for name, shard in member.shards.items()}
    with beside(
        channel,
        rank,
        settings.site,
        device,
        own,
        plain_pieces(member.shards),
        limits=settings.limits,
        attempt=settings.attempt,
    ) as end:
        follow(member, channel, rank, wait_s, watch, end)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))


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
        mesh = join(team.folder, 0, size, device, context.limits.exchange_s)
        watch = watched(context.limits.exchange_s)
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
        return program(__name__, keep)
    return forked(lambda end, _rank: main(end), keep)
