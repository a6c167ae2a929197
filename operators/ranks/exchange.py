"""Exchanges of ranks: rank 0 announces each, all take part, and an error names the rank that broke
it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from dataflow.errors import DeadlineError, RunError, WorkerDied
from dataflow.system.channel import Channel
from operators.ranks.messages import Failed, Sleep, SleepDone, Wake
from operators.ranks.team import BLAME_S, Team, timed_out
from operators.ranks.watch import ExchangeWatch

T = TypeVar("T")

LOOK_S = 5.0
"""A rank that waits for a message looks this often whether rank 0 still lives."""


class Exchange:
    """Rank 0's side.

    consumes: what rank 0 wants done
    produces: messages to the other ranks
    waits for: the other ranks, in each exchange, up to the group's time-out
    unblocked by: their part of it, their end, or the time-out; after an error every call raises
    """

    def __init__(self, team: Team, watch: ExchangeWatch) -> None:
        self.team, self._watch = team, watch
        self._broken = ""

    def tell(self, message: Any) -> None:
        """Say what comes. Raises RunError when the ranks are not in step any more."""
        self.check()
        self.team.tell(message)

    def check(self) -> None:
        """Raise RunError when the ranks are not in step any more."""
        if self._broken:
            raise RunError(
                f"the ranks of '{self.team.node}' are not in step any more: {self._broken}; build"
                " it again"
            )

    def answers(self, kind: type[T], wait_s: float | None = None) -> list[T]:
        """What each of the other ranks answers, a message of this kind, in their order."""
        wait_s = self.team.limits.exchange_s if wait_s is None else wait_s
        with self._watch.lifted():
            return [self.team.answer(rank, kind, wait_s) for rank in range(1, self.team.size)]

    @contextlib.contextmanager
    def beside(self, message: Sleep | Wake) -> Iterator[None]:
        """Have the others put memory aside, or take it again, while rank 0 does so within; over
        when all have.
        """
        with self.together(f"a {type(message).__name__.lower()}"):
            self.tell(message)
            with self._watch.lifted():
                yield
            self.answers(SleepDone, self.team.limits.checkpoint_s)

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """An error that another rank may have caused, as one that names it; the ranks end with
        it.
        """
        try:
            with self._watch.within():
                yield
        except Exception as error:
            if self._broken:
                raise
            cause = self.team.blame(error, doing)
            self._broken = str(cause)
            self.team.close()
            if cause is error:
                raise
            raise cause from error

    def close(self) -> None:
        """End the other ranks; may be called again."""
        self._watch.close()
        self.team.close()


def next_message(
    channel: Channel[Any],
    rank: int,
    parent: int,
    wait_s: float,
    *,
    look_s: float = LOOK_S,
    meanwhile: Callable[[], None] = lambda: None,
) -> Any:
    """Rank 0's next message; `wait_s` bounds a message that has begun; `meanwhile` is called every
    `look_s` seconds. Raises WorkerDied when rank 0 has ended.

    Raises WorkerDied when rank 0 has ended.
    """
    while not channel.readable(look_s):
        meanwhile()
        if os.getppid() != parent:
            raise WorkerDied(
                f"rank {rank} waited for a word of rank 0 (pid {parent}), which has ended; see"
                " its log"
            )
    try:
        return channel.receive(wait_s)
    except EOFError:
        raise WorkerDied(
            f"rank {rank} waited for a word of rank 0 (pid {parent}), which ended without saying"
            " so; see its log"
        ) from None


def expected(kind: type[T], channel: Channel[Any], rank: int, parent: int, wait_s: float) -> T:
    """The next message of rank 0, which is of this kind. Raises RunError for another, and as
    `next_message`.
    """
    message = next_message(channel, rank, parent, wait_s)
    if not isinstance(message, kind):
        raise RunError(
            f"rank {rank} waited for '{kind.__name__}' of rank 0 (pid {parent}), but it said"
            f" {message!r:.200}"
        )
    return message


@contextlib.contextmanager
def named(
    channel: Channel[Any], rank: int, parent: int, doing: str, watch: ExchangeWatch
) -> Iterator[None]:
    """On another rank: turn a broken exchange into an error that names who waited for whom."""
    try:
        with watch.within():
            yield
    except (RuntimeError, TimeoutError) as error:
        if isinstance(error, RunError):
            raise
        waited = f"rank {rank} waited for the other ranks in {doing}"
        if timed_out(error):
            raise DeadlineError(
                f"{waited}, and one was silent ({error}); see rank 0's log (pid {parent})"
            ) from error
        if channel.readable(BLAME_S):
            raise WorkerDied(
                f"{waited}, and rank 0 (pid {parent}) or another ended ({error}); see its log"
            ) from error
        raise


def send_failure(channel: Channel[Any], error: Exception) -> None:
    """On another rank: send rank 0 the error that ends this rank."""
    with contextlib.suppress(OSError):
        channel.send(Failed(type(error).__name__, f"{type(error).__name__}: {error}"))
