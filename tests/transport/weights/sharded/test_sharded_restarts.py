"""Ranks of a trainer and of generators, killed at every moment of a round and started again: who
serves what then.
"""

import os
import signal
import time

import pytest

from transport.weights import ShardedWriter

from ..restart_programs import (
    ALONE,
    ROUNDS,
    SHARDED_GENERATOR_DIES,
    SHARDED_TRAINER_DIES,
    generate_shard,
    served,
    train_shard,
)
from ..sharded_programs import BUCKET_BYTES, DEADLINE_S, HALVES, WHOLE, values
from ..sharded_rig import until

pytestmark = pytest.mark.slow


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/meet"


@pytest.fixture
def writer(address):
    writer = ShardedWriter(WHOLE, 0, address, deadlines=ROUNDS, bucket_bytes=BUCKET_BYTES)
    yield writer
    writer.close()


def ends(child):
    child.join(DEADLINE_S)
    return child.exitcode


def publish(writer, version):
    writer.publish(version, values(WHOLE, 0, version))
    until(lambda: writer.poll() or writer.pending is None)


def holds(writer, name, version):
    return any((status.name, status.version) == (name, version) for status in writer.readers)


@pytest.mark.parametrize("moment", [*SHARDED_TRAINER_DIES, "adopted"])
def test_after_a_trainer_is_killed_every_group_serves_what_its_successor_has(
    start, address, tmp_path, moment
):
    whole = start(generate_shard, address, "whole", WHOLE, 0, (1, 2), tmp_path)
    halves = [
        start(generate_shard, address, "halves", HALVES, rank, (1, 2), tmp_path)
        for rank in range(2)
    ]
    names = ["whole", "halves"]
    assert ends(start(train_shard, address, WHOLE, 0, 0, [1, 2], names, moment)) == -signal.SIGKILL
    assert ends(start(train_shard, address, WHOLE, 0, 1, [1, 2], names)) == 0
    assert [ends(child) for child in (whole, *halves)] == [0, 0, 0]
    for name in ("whole.0", "halves.0", "halves.1"):
        first, rest = served(tmp_path, name)[:-2], served(tmp_path, name)[-2:]
        assert rest == [(1, 1), (1, 2)]
        assert first == [(0, 1), (0, 2)][: len(first)]
        assert moment != "adopted" or len(first) == 2
    assert not list(tmp_path.glob("meet*"))


@pytest.mark.parametrize("moment", SHARDED_GENERATOR_DIES)
def test_a_rank_killed_at_any_moment_is_followed_by_one_that_serves_the_newest_version_alone(
    start, writer, address, tmp_path, moment
):
    victim = start(generate_shard, address, "pair", HALVES, 1, (0, 9), tmp_path, moment)
    stays = start(generate_shard, address, "pair", HALVES, 0, (0, 4), tmp_path)
    other = start(generate_shard, address, "other", WHOLE, 0, (0, 4), tmp_path)
    publish(writer, 1)
    until(lambda: holds(writer, "other", 1) and (moment == "forming" or holds(writer, "pair", 1)))
    publish(writer, 2)
    assert ends(victim) == -signal.SIGKILL
    before = len(served(tmp_path, "pair.1"))
    publish(writer, 3)
    until(lambda: holds(writer, "other", 3))
    successor = start(generate_shard, address, "pair", HALVES, 1, (0, 4), tmp_path)
    until(lambda: holds(writer, "pair", 3))
    publish(writer, 4)
    assert [ends(child) for child in (stays, other, successor)] == [0, 0, 0]
    assert served(tmp_path, "pair.1")[before:] == [(0, 3), (0, 4)]


@pytest.mark.parametrize("moment", ["sending", "adopted"])
def test_a_trainer_whose_first_rank_is_killed_is_followed_by_a_new_one_and_by_no_old_rank(
    start, address, tmp_path, moment
):
    group = start(generate_shard, address, "group", WHOLE, 0, (1, 2), tmp_path)
    left = start(train_shard, address, HALVES, 1, 0, [1, 2], [])
    assert (
        ends(start(train_shard, address, HALVES, 0, 0, [1, 2], ["group"], moment))
        == -signal.SIGKILL
    )
    first = start(train_shard, address, HALVES, 0, 1, [1, 2], ["group"])
    assert ends(left) == ALONE
    second = start(train_shard, address, HALVES, 1, 1, [1, 2], [])
    assert (ends(first), ends(group)) == (0, 0)
    second.kill()
    assert served(tmp_path, "group.0")[-2:] == [(1, 1), (1, 2)]


def test_a_trainer_that_sleeps_longer_than_any_deadline_goes_on_with_its_groups(
    start, address, tmp_path
):
    group = start(generate_shard, address, "group", WHOLE, 0, (0, 30), tmp_path)
    trainer = start(train_shard, address, WHOLE, 0, 0, range(1, 31), ["group"])
    until(lambda: len(served(tmp_path, "group.0")) > 5)
    os.kill(trainer.pid, signal.SIGSTOP)
    time.sleep(ROUNDS.gone_s + 2.0)
    os.kill(trainer.pid, signal.SIGCONT)
    assert (ends(group), ends(trainer)) == (0, 0)
    assert served(tmp_path, "group.0") == [(0, version) for version in range(1, 31)]
