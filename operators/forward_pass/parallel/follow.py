"""A forward operator's rank behind rank 0, in a process that rank 0 forked: it computes what it is told, in step."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dataflow.errors import RunError
from dataflow.limits import Limits
from dataflow.system.channel import Channel
from dataflow.weight_ends import WeightsBeside
from operators.engine.parallel.messages import Enter, Entry, Leave, Meet, Pieces, Take
from operators.engine.parallel.shards import Shard, plain_pieces
from operators.forward_pass.parallel.messages import CODEC, Compute, Join
from operators.ranks import group
from operators.ranks.exchange import expected, last_words, named, next_message
from operators.ranks.messages import Close, Load, Loaded
from operators.training.learner.learner import Forward


@dataclass(frozen=True)
class RankForward:
    """One rank's model, cut."""

    forward: Forward
    shards: Mapping[str, Shard]
    """What it holds of it, by name."""

    @property
    def tensors(self) -> dict[str, Any]:
        """What versions go into."""
        return {name: shard.local for name, shard in self.shards.items()}


@dataclass(frozen=True)
class Duties:
    """What a rank does of its own; a fork inherits it."""

    limits: Limits
    join: Callable[[Path], Any]
    """Meets the other ranks in a folder; their mesh."""
    load: Callable[[Any], RankForward]
    """Reads the model and keeps this rank's slices, given the mesh."""
    opens: Callable[[RankForward, Sequence[Mapping[str, Any]]], WeightsBeside] | None
    """Opens its end of the weight plane, given what each rank holds; None where no weights come."""


def run_rank(end: int, rank: int, duties: Duties) -> int:
    """Run a rank over the socket of this number; the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=end), CODEC, duties.limits.exchange_s)
    try:
        with contextlib.ExitStack() as ends:
            _serve(channel, rank, duties, ends)
    except Exception as error:
        traceback.print_exc()
        last_words(channel, error)
        return 1
    finally:
        channel.close()
    group.leave()
    return 0


def _serve(channel: Channel[Any], rank: int, duties: Duties, ends: contextlib.ExitStack) -> None:
    """Join, load, and follow rank 0 to the end.

    consumes: messages of rank 0
    produces: this rank's part of each exchange
    waits for: the next message, as long as rank 0 lives; in an exchange, the group's time-out
    unblocked by: a message; the end of rank 0, which closes the channel
    """
    parent, wait_s = os.getppid(), duties.limits.exchange_s
    mesh = duties.join(Path(expected(Join, channel, rank, parent, wait_s).folder))
    expected(Load, channel, rank, parent, wait_s)
    own = duties.load(mesh)
    channel.send(Loaded())
    beside: WeightsBeside | None = None
    if duties.opens is not None:
        channel.send(Pieces(plain_pieces(own.shards)))
        beside = duties.opens(own, expected(Meet, channel, rank, parent, wait_s).pieces)
        ends.callback(beside.close)
    watch = group.watched(wait_s)
    while not isinstance(message := next_message(channel, rank, parent, wait_s), Close):
        with named(channel, rank, parent, type(message).__name__.lower(), watch):
            _apply(message, own.forward, beside, channel)


def _apply(message: Any, forward: Forward, beside: WeightsBeside | None, channel: Channel[Any]) -> None:
    match message:
        case Compute():
            with torch.no_grad():
                forward.computed(*message.given)
        case Enter() if beside is not None:
            channel.send(Entry(beside.enter(message.segment, message.version, message.layout)))
        case Leave() if beside is not None:
            beside.decline()
        case Take() if beside is not None:
            beside.adopt()
        case other:
            raise RunError(f"a rank of a forward operator was told {other!r:.200}, which it does not know")
