"""A forward operator's rank behind rank 0, in a process that rank 0 forked: it computes what it is told, in step."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dataflow.errors import RunError
from dataflow.limits import Limits
from dataflow.system.channel import Channel
from operators.forward_pass.parallel.messages import CODEC, Compute, Join
from operators.ranks import group
from operators.ranks.exchange import expected, last_words, named, next_message
from operators.ranks.messages import Close, Load, Loaded
from operators.training.learner.learner import Forward


@dataclass(frozen=True)
class Duties:
    """What a rank does of its own; a fork inherits it."""

    limits: Limits
    join: Callable[[Path], Any]
    """Meets the other ranks in a folder; their mesh."""
    load: Callable[[Any], Forward]
    """Reads the model and keeps this rank's slices, given the mesh."""


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
    expected(Load, channel, rank, parent, wait_s)
    forward = duties.load(mesh)
    channel.send(Loaded())
    watch = group.watched(wait_s)
    while not isinstance(message := next_message(channel, rank, parent, wait_s), Close):
        if not isinstance(message, Compute):
            raise RunError(f"rank {rank} was told {message!r:.200}, which it does not know")
        with named(channel, rank, parent, "a pass", watch), torch.no_grad():
            forward.computed(*message.given)
