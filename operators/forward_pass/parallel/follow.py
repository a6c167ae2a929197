"""A forward operator's rank behind rank 0, in a process that rank 0 forked: it computes what it is told, in step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dataflow.errors import RunError
from dataflow.system.channel import Channel
from operators.forward_pass.parallel.messages import Compute, Join
from operators.ranks import group
from operators.ranks.exchange import expected, named, next_message
from operators.ranks.messages import Close, Load, Loaded
from operators.training.learner.learner import Forward


def follow(
    channel: Channel[Any], rank: int, wait_s: float, join: Callable[[Path], Any], load: Callable[[Any], Forward]
) -> None:
    """Join, load, and follow rank 0 to the end.

    wait_s: for an exchange. join: meets the other ranks in a folder; their mesh. load: reads the model and keeps this
    rank's slices, given the mesh.

    consumes: messages of rank 0
    produces: this rank's part of each exchange
    waits for: the next message, as long as rank 0 lives; in an exchange, the group's time-out
    unblocked by: a message; the end of rank 0, which closes the channel
    """
    parent = os.getppid()
    mesh = join(Path(expected(Join, channel, rank, parent, wait_s).folder))
    expected(Load, channel, rank, parent, wait_s)
    forward = load(mesh)
    channel.send(Loaded())
    watch = group.watched(wait_s)
    while not isinstance(message := next_message(channel, rank, parent, wait_s), Close):
        if not isinstance(message, Compute):
            raise RunError(f"rank {rank} was told {message!r:.200}, which it does not know")
        with named(channel, rank, parent, "a pass", watch), torch.no_grad():
            forward.computed(*message.given)
