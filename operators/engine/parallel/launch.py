"""Builds an engine that runs on several ranks, from the side of rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import torch

from dataflow.node import Context
from dataflow.weight_ends import OpensWeights
from operators.engine.build import Built
from operators.engine.knobs import GeneratorKnobs
from operators.engine.parallel import group
from operators.engine.parallel.leader import Leader
from operators.engine.parallel.lockstep import Lockstep
from operators.engine.parallel.member import make_member
from operators.engine.parallel.messages import CODEC, Meet, Pieces, Settings, Started
from operators.engine.parallel.shards import plain_pieces
from operators.ranks.exchange import Exchange
from operators.ranks.messages import Build, Load, Loaded
from operators.ranks.team import Team, program


def make_parallel(declaration: GeneratorKnobs, context: Context, size: int) -> Built:
    """As `build_native`, on `size` ranks: this process is rank 0; on GPUs, rank r takes the r-th after this one's.

    Raises:
        ModelError: the model cannot be loaded or dealt out.
        WorkerDied, DeadlineError: a rank did not start.
    """
    device = torch.device(context.device)
    opens = context.reader if isinstance(context.reader, OpensWeights) and context.reader.site else None
    start = program("operators.engine.parallel.follower", context.turn_files)
    team = Team(declaration.name, size, start, context.limits, CODEC)
    with team.starting():
        for rank in range(1, size):
            team.answer(rank, Started)
        for rank in range(1, size):
            place = f"cuda:{(device.index or 0) + rank}" if device.type == "cuda" else context.device
            settings = Settings(
                declaration=declaration, node=context.node, replica=context.rank, rank=rank, size=size, device=place,
                threads=context.threads, folder=str(team.folder), site=None if opens is None else opens.site,
                attempt=context.attempt, narrow=context.narrow, limits=context.limits,
                aside=None if context.aside is None else str(context.aside),
            )  # fmt: skip
            team.tell(settings, rank)
        mesh = group.join(team.folder, 0, size, device, context.limits.exchange_s)
        watch = group.watched(context.limits.exchange_s)

        @contextlib.contextmanager
        def loading(in_turn: bool) -> Iterator[None]:
            with watch.lifted():
                if not in_turn:
                    team.tell(Load())
                yield
                for rank in range(1, size):
                    if in_turn:
                        team.tell(Load(), rank)
                    team.answer(rank, Loaded)
            team.tell(Build())

        with watch.within():
            member = make_member(declaration, context, mesh, loading)
        pieces = (plain_pieces(member.shards), *(team.answer(rank, Pieces).pieces for rank in range(1, size)))
        if opens is not None:
            team.tell(Meet(pieces))
    exchange = Exchange(team, watch)
    lockstep = Lockstep(member, exchange, context.clock)
    reader = None if opens is None else functools.partial(Leader, lockstep, opens, pieces)
    return dataclasses.replace(member.built, engine=lockstep, reader=reader, ranks=exchange)
