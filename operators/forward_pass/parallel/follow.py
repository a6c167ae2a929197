"""A forward operator's rank behind rank 0, in a process that rank 0 forked: it computes what it is told, in step."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dataflow.errors import RunError
from dataflow.limits import Limits
from dataflow.system.channel import Channel
from operators.engine.parallel.shards import plain_pieces
from operators.engine.parallel.sliced_model import SlicedModel
from operators.forward_pass.asked import Reading
from operators.forward_pass.parallel.messages import CODEC, Compute, Join
from operators.ranks import group
from operators.ranks.exchange import expected, last_words, named, next_message
from operators.ranks.loading import Loading, following
from operators.ranks.messages import Close
from operators.ranks.weights import Take, beside, followed


@dataclass(frozen=True)
class Duties:
    """What a rank does of its own; a fork inherits it."""

    limits: Limits
    site: Mapping[str, Any] | None
    """Where the ranks find versions of the weights; None: they are frozen."""
    device: str
    attempt: int
    """The scheduler's, at rank 0."""
    join: Callable[[Path], Any]
    """Meets the other ranks in a folder; their mesh."""
    load: Callable[[Any, Loading], tuple[SlicedModel, Reading]]
    """Reads this rank's slices, given the mesh, and makes what computes with them, in step with the other ranks."""


def run_rank(end: int, rank: int, duties: Duties) -> int:
    """Run a rank over the socket of this number; the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=end), CODEC, duties.limits.exchange_s)
    try:
        _serve(channel, rank, duties)
    except Exception as error:
        traceback.print_exc()
        last_words(channel, error)
        return 1
    finally:
        channel.close()
    group.leave()
    return 0


def _serve(channel: Channel[Any], rank: int, duties: Duties) -> None:
    """Join, load, and follow rank 0 to the end.

    consumes: messages of rank 0
    produces: this rank's part of each exchange
    waits for: the next message, as long as rank 0 lives; in an exchange, the group's time-out
    unblocked by: a message; the end of rank 0, which closes the channel
    """
    parent, wait_s = os.getppid(), duties.limits.exchange_s
    mesh = duties.join(Path(expected(Join, channel, rank, parent, wait_s).folder))
    watch = group.watched(wait_s)
    with named(channel, rank, parent, "loading", watch):
        own, reading = duties.load(mesh, following(channel, rank, wait_s, watch))
    forward, end = reading.forward, None
    with contextlib.ExitStack() as ends:
        if duties.site is not None:
            tensors = {name: shard.local for name, shard in own.shards.items()}
            end = beside(
                channel, rank, duties.site, duties.device, tensors, plain_pieces(own.shards), limits=duties.limits,
                attempt=duties.attempt,
            )  # fmt: skip
            ends.callback(end.close)
        while not isinstance(message := next_message(channel, rank, parent, wait_s), Close):
            with named(channel, rank, parent, type(message).__name__.lower(), watch), torch.no_grad():
                if isinstance(message, Compute):
                    forward.computed(*message.given)
                elif end is None or not followed(message, channel, end):
                    raise RunError(f"rank {rank} was told {message!r:.200}, which it does not know")
                elif isinstance(message, Take) and own.merged is not None:
                    own.merged.adopted()
