"""A forward operator's rank behind rank 0, in a process that rank 0 forked: it computes what it is
told, in step."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from dataflow.errors import RunError
from dataflow.system.channel import Channel
from dataflow.weight_ends import WeightsBeside
from operators.engine.parallel.sliced_model import SlicedModel
from operators.forward_pass.parallel.messages import Compute, Join
from operators.forward_pass.query import Reading
from operators.models.read_weights import RankMemory
from operators.ranks import group
from operators.ranks.exchange import expected, named, next_message
from operators.ranks.loading import Loading, following
from operators.ranks.messages import Close
from operators.ranks.weights import Take, followed


def follow(
    channel: Channel[Any],
    rank: int,
    wait_s: float,
    join: Callable[[Path], Any],
    load: Callable[[Any, Loading], tuple[SlicedModel, Reading]],
    opens: Callable[[SlicedModel], AbstractContextManager[WeightsBeside | None]],
    aside: Path | None,
) -> None:
    """Join, load, and follow rank 0 to the end.

    wait_s: for an exchange. join: meets the other ranks in a folder; their mesh. load: reads this
    rank's slices, given the mesh, and makes what computes with them, in step with the other ranks.
    opens: its end of the weight plane, where versions of the weights come. aside: as of `Context`.

    consumes: messages of rank 0; its own part of each version
    produces: this rank's part of each exchange
    waits for: the next message, as long as rank 0 lives; in an exchange, the group's time-out
    unblocked by: a message; the end of rank 0, which closes the channel
    """
    parent = os.getppid()
    mesh = join(Path(expected(Join, channel, rank, parent, wait_s).folder))
    watch = group.watched(wait_s)
    with named(channel, rank, parent, "loading", watch):
        own, reading = load(mesh, following(channel, rank, wait_s, watch))
    attached = (shard.local for shard in own.shards.values())
    with opens(own) as end:
        memory = RankMemory(
            attached, aside, end, lambda: [*own.module.parameters(), *own.module.buffers()]
        )
        while not isinstance(message := next_message(channel, rank, parent, wait_s), Close):
            with (
                named(channel, rank, parent, type(message).__name__.lower(), watch),
                torch.no_grad(),
            ):
                if isinstance(message, Compute):
                    reading.forward.at(message.temperature)
                    reading.forward.computed(*message.given)
                elif not (
                    followed(message, channel, end) or memory.followed(message, channel, watch)
                ):
                    raise RunError(f"rank {rank} was told {message!r:.200}, which it does not know")
                elif isinstance(message, Take) and own.merged is not None:
                    own.merged.adopted()
