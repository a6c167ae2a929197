"""A trainer's rank behind rank 0, in a process that rank 0 forked: it does what it is told, in step with the others."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.errors import RunError
from dataflow.limits import Limits
from dataflow.system.channel import Channel
from dataflow.weight_ends import WeightsOut
from operators.ranks import group
from operators.ranks.exchange import expected, last_words, named, next_message
from operators.ranks.messages import Close
from operators.training.learner.learner import Learner
from operators.training.learner.packing import Array
from operators.training.parallel.lead import in_order
from operators.training.parallel.messages import (
    CODEC,
    Begin,
    Call,
    End,
    Join,
    Micro,
    Open,
    Publish,
    Result,
    function_of,
)

POLL_S = 0.02
"""How often a rank that waits for a message looks after its end of the weight plane."""


@dataclass(frozen=True)
class Duties:
    """What a rank does of its own; a fork inherits it."""

    ranks: int
    limits: Limits
    build: Callable[[Channel[Any], Path], Learner]
    """Makes its learner, in step with the other ranks, given the folder that they meet in."""
    opens: Callable[[Sequence[Mapping[str, Any]], Learner], WeightsOut]
    """Opens its end of the weight plane at these sites."""


def run_rank(end: int, rank: int, duties: Duties) -> int:
    """Run a rank over the socket of this number; the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=end), CODEC, duties.limits.exchange_s)
    parent = os.getppid()
    try:
        folder = Path(expected(Join, channel, rank, parent, duties.limits.exchange_s).folder)
        RankFollower(duties.build(channel, folder), channel, rank, duties).run()
    except Exception as error:
        traceback.print_exc()
        last_words(channel, error)
        return 1
    finally:
        channel.close()
    group.leave()
    return 0


class RankFollower:
    """The loop of one rank.

    consumes: messages of rank 0
    produces: this rank's part of each exchange, and of each version on the weight plane
    waits for: the next message, as long as rank 0 lives; in an exchange, the group's time-out
    unblocked by: a message; the end of rank 0, which closes the channel
    """

    def __init__(self, learner: Learner, channel: Channel[Any], rank: int, duties: Duties) -> None:
        self._learner, self._channel, self._rank, self._duties = learner, channel, rank, duties
        self._parts: list[Array] = []
        self._writer: WeightsOut | None = None

    def run(self) -> None:
        """Do what rank 0 says until it says that all is over.

        Raises:
            WorkerDied: rank 0 ended without saying so.
            DeadlineError: an exchange was not over in time.
        """
        parent, wait_s = os.getppid(), self._duties.limits.exchange_s
        watch = group.watched(wait_s)
        while True:
            message = next_message(self._channel, self._rank, parent, wait_s, look_s=POLL_S, meanwhile=self._poll)
            if isinstance(message, Close):
                self._close()
                return
            with named(self._channel, self._rank, parent, type(message).__name__.lower(), watch):
                self._apply(message)
            self._poll()

    def _apply(self, message: Any) -> None:
        learner = self._learner
        match message:
            case Begin():
                learner.open(message.rows.rows(), message.scale.array, message.version)
                self._parts = in_order(message.counts)
            case Micro():
                learner.micro(self._parts.pop(0))
            case End():
                if learner.end(message.learning_rate).culprit is not None:
                    self._channel.send(learner.findings())
            case Open():
                self._writer = learner.writer = self._duties.opens(message.sites, learner)
            case Publish():
                assert self._writer is not None, "opened before"
                self._writer.publish(message.version, learner.parameters)
            case Call():
                call = function_of(message.function)
                result = call(learner=learner, rank=self._rank, ranks=self._duties.ranks, **message.arguments)
                self._channel.send(Result(result))
            case other:
                raise RunError(f"rank {self._rank} was told {other!r}, which it does not know")

    def _poll(self) -> None:
        if self._writer is not None:
            self._writer.poll()

    def _close(self) -> None:
        close = getattr(self._writer, "close", None)
        if close is not None:
            close()
