"""A collective has a deadline of ours, which stands still while the ranks are stopped; gloo's own
does not.
"""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from rigs.machine import wait_until

from dataflow.limits import Limits
from dataflow.system.messages import Channel, Message
from operators.ranks import group
from operators.ranks.group import ExchangeWatch
from operators.ranks.team import Load, Loaded, Team, codec_of, forked

WAIT_S = 60.0
LIMIT_S = 4.0


class Hand:
    """A clock that is moved by hand, until something has happened."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def move_until(self, happened: threading.Event, by_s: float) -> bool:
        for _ in range(100):
            if happened.wait(0.1):
                return True
            self.now += by_s
        return False


def test_an_exchange_that_waits_beyond_its_limit_is_broken_off_and_says_so() -> None:
    hand, broken = Hand(), threading.Event()
    watch = ExchangeWatch(10.0, broken.set, computes=False, clock=hand)
    with pytest.raises(TimeoutError, match="timed out after 10 s"), watch.within():
        assert hand.move_until(broken, by_s=1.0)
        raise RuntimeError("pair closed")


def test_what_fails_by_itself_is_no_time_out_and_between_exchanges_nothing_is_late() -> None:
    hand, broken = Hand(), threading.Event()
    watch = ExchangeWatch(10.0, broken.set, computes=False, clock=hand)
    with pytest.raises(RuntimeError, match="out of memory"), watch.within():
        raise RuntimeError("out of memory")
    hand.now += 1000.0
    with watch.within(), watch.lifted():
        hand.now += 1000.0
        assert not broken.wait(0.5)
    watch.close()


def test_a_rank_that_computes_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [0.0]
    monkeypatch.setattr("operators.ranks.group._used_by", lambda thread: lambda: used[0])
    hand, broken = Hand(), threading.Event()
    watch = ExchangeWatch(10.0, broken.set, clock=hand)
    with watch.within():
        for _ in range(10):
            used[0] += 1.0
            hand.now += 3.0
            assert not broken.wait(0.25)
    watch.close()


class Sum(Message):
    value: float | str


CODEC = codec_of("test", Sum)


def member(folder: Path, end: int, rank: int) -> int:
    """Ranks 1 and 2 of the team are 0 and 1 of the group; the second enters the collective when it
    is told to.
    """
    torch.set_num_threads(1)
    channel = Channel(socket.socket(fileno=end), CODEC, WAIT_S)
    group.join(folder, rank - 1, 2, torch.device("cpu"), LIMIT_S)
    watch = group.watched(LIMIT_S)
    channel.send(Loaded())
    if rank == 2:
        channel.receive(WAIT_S)
    said, tensor = "", torch.ones(1)
    try:
        with watch.within():
            dist.all_reduce(tensor)
    except (RuntimeError, TimeoutError) as error:
        said = f"{type(error).__name__}: {error}"
    channel.send(Sum(said or float(tensor)))
    return 0


@pytest.fixture
def team(tmp_path: Path):
    made = Team(
        "ranks",
        3,
        forked(lambda end, rank: member(tmp_path, end, rank)),
        Limits(start_s=WAIT_S),
        CODEC,
    )
    for rank in (1, 2):
        made.answer(rank, Loaded)
    yield made
    made.close()


def stopped(pids: list[int]) -> bool:
    return {psutil.Process(pid).status() for pid in pids} == {psutil.STATUS_STOPPED}


@pytest.mark.slow
def test_ranks_that_are_stopped_in_a_collective_for_longer_than_its_limit_go_on_in_it(
    team: Team,
) -> None:
    pids = [process.pid for process in team._processes.values()]
    time.sleep(1.0)  # the first is in the collective
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: stopped(pids), 10.0, "the stop")
    time.sleep(2.5 * LIMIT_S)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    team.tell(Load(), 2)
    assert [team.answer(rank, Sum).value for rank in (1, 2)] == [2.0, 2.0]


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_never_comes_ends_though_gloo_would_wait_for_ever(
    team: Team,
) -> None:
    assert team.answer(1, Sum).value == f"TimeoutError: timed out after {LIMIT_S:g} s"
    team.tell(Load(), 2)
    assert "RuntimeError" in team.answer(2, Sum).value
