"""A trainer's rank behind rank 0, in a process that rank 0 forked: it does what it is told, in step
with the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dataflow.errors import RunError
from dataflow.system.channel import Channel
from dataflow.weight_ends import WeightsOut
from operators.ranks import group
from operators.ranks.exchange import named, next_message
from operators.ranks.messages import Close
from operators.training.learner.learner import Learner
from operators.training.learner.packing import Array
from operators.training.parallel.lead import in_order
from operators.training.parallel.messages import (
    BeginStep,
    CallFunction,
    CallResult,
    EndStep,
    Micro,
    Open,
    Publish,
    function_of,
)

POLL_S = 0.02
"""How often a rank that waits for a message looks after its end of the weight plane."""


class RankFollower:
    """The loop of one rank.

    consumes: messages of rank 0
    produces: this rank's part of each exchange, and of each version on the weight plane
    waits for: the next message, as long as rank 0 lives; in an exchange, the group's time-out
    unblocked by: a message; the end of rank 0, which closes the channel
    """

    def __init__(
        self,
        learner: Learner,
        channel: Channel[Any],
        rank: int,
        ranks: int,
        wait_s: float,
        opens: Callable[[Sequence[Mapping[str, Any]], int, Learner], WeightsOut],
    ) -> None:
        """wait_s: for an exchange. opens: this rank's end of a weight plane at these sites, for
        what is offered there on that line."""
        self._learner, self._channel, self._rank, self._ranks = learner, channel, rank, ranks
        self._wait_s, self._opens = wait_s, opens
        self._parts: list[Array] = []

    def run(self) -> None:
        """Do what rank 0 says until it says that all is over.

        Raises:
            WorkerDied: rank 0 ended without saying so.
            DeadlineError: an exchange was not over in time.
        """
        parent, wait_s = os.getppid(), self._wait_s
        watch = group.watched(wait_s)
        while True:
            message = next_message(
                self._channel, self._rank, parent, wait_s, look_s=POLL_S, meanwhile=self._poll
            )
            if isinstance(message, Close):
                self._close()
                return
            with named(self._channel, self._rank, parent, type(message).__name__.lower(), watch):
                self._apply(message)
            self._poll()

    def _apply(self, message: Any) -> None:
        learner = self._learner
        match message:
            case BeginStep():
                learner.open(message.rows.rows(), message.scale.array, message.version)
                self._parts = in_order(message.counts)
            case Micro():
                learner.micro(self._parts.pop(0))
            case EndStep():
                if learner.end(message.learning_rate).culprit is not None:
                    self._channel.send(learner.findings())
            case Open():
                learner.writers[message.line] = self._opens(message.sites, message.line, learner)
            case Publish():
                learner.writers[message.line].publish(
                    message.version, learner.offered(message.line)
                )
            case CallFunction():
                call = function_of(message.function)
                result = call(
                    learner=learner, rank=self._rank, ranks=self._ranks, **message.arguments
                )
                self._channel.send(CallResult(result))
            case other:
                raise RunError(f"rank {self._rank} was told {other!r}, which it does not know")

    def _poll(self) -> None:
        for writer in self._learner.writers.values():
            writer.poll()

    def _close(self) -> None:
        for writer in self._learner.writers.values():
            close = getattr(writer, "close", None)
            if close is not None:
                close()
