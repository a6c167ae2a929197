"""Ranks on another host: what is said to them, their ends, the ends of their hosts, and where they
meet.
"""

import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_ranks_processes import CODEC, Answer, End

from dataflow.errors import RunError, WorkerDied
from dataflow.limits import Limits
from dataflow.runtime import RunSettings
from dataflow.system.child import Child, fork
from dataflow.system.rank_places import RankPlaces
from dataflow.system.security import RunKeys
from dataflow.worker.host import Settings
from dataflow.worker.rank_line import FarRank, RankHost, RankLine
from operators.ranks import group
from operators.ranks.group import RankZeroStore
from operators.ranks.team import Team, forked, on_their_hosts, run_rank
from transport.life import Life

WAIT_S = 20.0


LIMITS = Limits(start_s=WAIT_S, exchange_s=WAIT_S)


KEYS = RunKeys.make()


HOSTS = ("a", "b", "b")


BIG = "x" * (5 << 20)


def answers(said: str) -> Callable[[int, int], int]:
    """A rank that says something large, repeats what it hears, and ends as it is told."""

    def main(end: int, rank: int) -> int:
        def work(channel):
            channel.send(Answer(said + BIG, rank, True))
            message = channel.receive(WAIT_S)
            while isinstance(message, Answer):
                channel.send(message)
                message = channel.receive(WAIT_S)
            if message.status:
                raise ValueError(f"told to end with {message.status}")

        return run_rank(end, CODEC, WAIT_S, work)

    return main


def there(line: RankLine, host: str, keys: RunKeys = KEYS) -> Child:
    """The process of a host's ranks."""

    def body() -> int:
        settings = Settings(
            folder="",
            worker="trainer",
            host=host,
            ranks_at=line.address,
            keys=keys.to_plain(),
            run=RunSettings(limits=LIMITS),
        )
        made = RankHost(settings, lambda told: answers(told["said"]))
        try:
            return made.run()
        finally:
            made.close()

    return fork(body, keep=(), ends_with_parent=signal.SIGKILL)


@contextlib.contextmanager
def team() -> Iterator[tuple[Team, RankLine, Child]]:
    line = RankLine("127.0.0.1", KEYS, HOSTS)
    places = RankPlaces(
        hosts=HOSTS,
        devices=("cpu",) * 3,
        address="127.0.0.1",
        meets_at=line.address,
        keys=KEYS,
        starts=line,
    )
    line.prepare({"said": "hello"})
    found = Team("trainer", 3, on_their_hosts(forked(answers("here")), places), LIMITS, CODEC)
    host = there(line, "b")  # rank 0 does not wait for it
    try:
        yield found, line, host
    finally:
        found.close()
        line.close()
        assert host.wait(WAIT_S) is not None


def test_they_hear_and_answer_as_ranks_here_do_and_end_with_the_worker() -> None:
    with team() as (ranks, _, host):
        for rank in (1, 2):
            assert ranks.answer(rank, Answer) == Answer("hello" + BIG, rank, True)
        ranks.tell(Answer(BIG, 7, False))
        assert [ranks.answer(rank, Answer).text for rank in (1, 2)] == [BIG, BIG]
        pids = [ranks._processes[rank].pid for rank in (1, 2)]
        assert all(pids) and not ranks.fallen()
    assert host.returncode == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_ends_one_is_said_with_its_host() -> None:
    with team() as (ranks, _, _):
        ranks.answer(1, Answer)
        ranks.tell(End(3), 1)
        with pytest.raises(
            WorkerDied,
            match=r"rank 1 .*on host 'b'.* ended with status 1 .*ValueError: told to end",
        ):
            ranks.answer(1, Answer)
        ranks.answer(2, Answer)
        os.kill(ranks._processes[2].pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"rank 2 .*on host 'b'.* ended by signal 9"):
            ranks.answer(2, Answer)


def test_when_the_process_of_a_host_ends_all_its_ranks_have_ended() -> None:
    with team() as (ranks, _, host):
        ranks.answer(1, Answer)
        ranks.answer(2, Answer)
        host.kill()
        for rank in (1, 2):
            with pytest.raises(WorkerDied, match=rf"rank {rank} .*on host 'b'"):
                ranks.answer(rank, Answer)
        assert ranks.fallen()


def test_the_ranks_of_an_attempt_that_has_ended_are_not_let_in() -> None:
    line = RankLine("127.0.0.1", KEYS, HOSTS, life=Life(attempt=1))
    stale = there(line, "b")  # of attempt 0
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = line.start(theirs, 1)
        assert not child.ended_within(0.5) and child.pid == 0
        child.kill()
        assert child.wait(WAIT_S) == -signal.SIGKILL
    line.close()
    assert stale.wait(WAIT_S) == 0, "it ends with the line"


def test_an_address_that_is_another_hosts_is_said() -> None:
    with pytest.raises(RunError, match="ranks on several hosts cannot listen at tcp://192.0.2.1"):
        RankLine("192.0.2.1", KEYS, HOSTS)


def test_ranks_of_a_host_that_never_came_can_be_ended() -> None:
    line = RankLine("127.0.0.1", KEYS, HOSTS)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = line.start(theirs, 1)
        child.kill()
        assert child.wait(WAIT_S) == -signal.SIGKILL
    line.close()


def test_who_has_no_key_of_the_run_is_not_heard(capfd) -> None:
    line = RankLine("127.0.0.1", KEYS, HOSTS)
    stranger = RankZeroStore(line.address, RunKeys.make(), 0.3)
    with pytest.raises(RuntimeError, match="timed out after 0 s: rank 0 at .* did not tell of x"):
        stranger.set("x", "1")
    stranger.close()
    line.close()


def test_ranks_meet_at_the_line_of_the_first(tmp_path: Path) -> None:
    line = RankLine("127.0.0.1", KEYS, HOSTS)
    first, other = (RankZeroStore(line.address, KEYS, WAIT_S) for _ in range(2))
    first.set("x", "5")
    assert other.get("x") == b"5" and other.check(["x"]) and not other.check(["x", "y"])
    assert [first.add("count", 2), other.add("count", 0)] == [2, 2]
    later = threading.Timer(0.2, lambda: first.set("y", b"\0\xff"))
    later.start()
    other.wait(["x", "y"])
    assert other.get("y") == b"\0\xff"
    later.join()
    assert first.delete_key("x") and not first.delete_key("x") and not other.check(["x"])
    first.close()
    other.close()
    line.close()


def test_groups_that_are_made_later_meet_there_too(tmp_path: Path) -> None:
    """torch keeps no reference to a store that is written in Python: it has to live as long as the
    process group.
    """
    line = RankLine("127.0.0.1", KEYS, HOSTS)
    places = RankPlaces(
        hosts=("a",), devices=("cpu",), address="127.0.0.1", meets_at=line.address, keys=KEYS
    )

    def rank() -> int:
        group.join(tmp_path, 0, 1, torch.device("cpu"), WAIT_S, places)
        gc.collect()
        made = dist.new_group([0])
        dist.all_reduce(torch.ones(1), group=made)
        group.leave()
        return 0

    assert fork(rank, keep=(1, 2)).wait(WAIT_S) == 0
    line.close()


def test_no_signal_for_a_far_rank_comes_to_the_processes_here() -> None:
    here, there = socket.socketpair()
    killed: list[int] = []
    received: list[int] = []
    before = signal.signal(signal.SIGWINCH, lambda number, frame: received.append(number))
    try:
        rank = FarRank(1, "b", here, killed.append)
        rank.signal(signal.SIGWINCH, group=True)
        rank.signal(signal.SIGWINCH)
        rank.kill()
    finally:
        signal.signal(signal.SIGWINCH, before)
        here.close()
        there.close()
    assert killed == [1] and not received
