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
from operators.engine.parallel.shards import pieces_of
from operators.engine.parallel.words import plain_declaration
from operators.ranks.exchange import Exchange
from operators.ranks.processes import program
from operators.ranks.team import Team


def make_parallel(declaration: GeneratorKnobs, context: Context, size: int) -> Built:
    """As `build_native`, on `size` ranks: this process is rank 0; on GPUs, rank r takes the r-th after this one's.

    Raises:
        ModelError: the model cannot be loaded or dealt out.
        WorkerDied, DeadlineError: a rank did not start.
    """
    device = torch.device(context.device)
    opens = context.reader if isinstance(context.reader, OpensWeights) and context.reader.site else None
    team = Team(declaration.name, size, program("operators.engine.parallel.follower"), context.limits)
    with team.starting():
        for rank in range(1, size):
            team.answer(rank, "started")
        settings = {
            "declaration": plain_declaration(declaration), "node": context.node, "threads": context.threads,
            "size": size, "folder": str(team.folder), "limits": dataclasses.asdict(context.limits),
            "replica": context.rank, "site": opens and opens.site,
        }  # fmt: skip
        for rank in range(1, size):
            place = f"cuda:{(device.index or 0) + rank}" if device.type == "cuda" else context.device
            team.tell({**settings, "rank": rank, "device": place}, rank)
        mesh = group.join(team.folder, 0, size, device, context.limits.exchange_s)
        watch = group.watched(context.limits.exchange_s)

        @contextlib.contextmanager
        def loading() -> Iterator[None]:
            with watch.lifted():
                yield
                for rank in range(1, size):
                    team.tell({"do": "load"}, rank)
                    team.answer(rank, "loaded")
            team.tell({"do": "build"})

        with watch.within():
            member = make_member(declaration, context, mesh, loading())
        others = [pieces_of(team.answer(rank, "pieces")) for rank in range(1, size)]
    lockstep = Lockstep(member, Exchange(team, watch), others, context.clock, own_slices=opens is not None)
    reader = None if opens is None else functools.partial(Leader, lockstep, opens)
    return dataclasses.replace(member.built, engine=lockstep, reader=reader)
