"""Reading a model on all ranks of a worker: all at once where each reads its own slices, else one
after the other.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from dataflow.system.channel import Channel
from operators.ranks.exchange import expected
from operators.ranks.messages import Build, Load, Loaded
from operators.ranks.team import Team
from operators.ranks.watch import ExchangeWatch

Loading = Callable[[bool], AbstractContextManager[None]]
"""Within it this rank reads the model; given True, it alone, since it holds the whole of it for a
moment. It ends when all ranks have read it, for which no exchange between ranks has to wait."""


def leading(team: Team, watch: ExchangeWatch) -> Loading:
    """Rank 0's."""

    @contextlib.contextmanager
    def loading(in_turn: bool) -> Iterator[None]:
        with watch.lifted():
            if not in_turn:
                team.tell(Load())
            yield
            for rank in range(1, team.size):
                if in_turn:
                    team.tell(Load(), rank)
                team.answer(rank, Loaded)
        team.tell(Build())

    return loading


def following(channel: Channel[Any], rank: int, wait_s: float, watch: ExchangeWatch) -> Loading:
    """The loading of another rank, in the turn that rank 0 gives it."""

    @contextlib.contextmanager
    def loading(_in_turn: bool) -> Iterator[None]:
        with watch.lifted():
            expected(Load, channel, rank, os.getppid(), wait_s)
            yield
            channel.send(Loaded())
            expected(Build, channel, rank, os.getppid(), wait_s)

    return loading
