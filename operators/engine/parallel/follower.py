"""A rank behind rank 0: a fork that `launch` makes, or python -m operators.engine.parallel.follower
FD.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from dataflow.limits import Limits
from dataflow.runtime import Context
from dataflow.system.channel import Channel
from operators.engine.parallel import group
from operators.engine.parallel.lockstep import follow
from operators.engine.parallel.member import make_member
from operators.engine.parallel.messages import CODEC, EngineSettings, Started
from operators.engine.parallel.shards import plain_pieces
from operators.ranks.exchange import expected
from operators.ranks.loading import following
from operators.ranks.process import run_rank
from operators.ranks.weights import beside

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
    mesh = group.join(Path(settings.folder), rank, settings.size, torch.device(device), wait_s)
    watch = group.watched(wait_s)
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
