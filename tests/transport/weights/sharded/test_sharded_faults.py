"""Ranks killed, frozen and restarted in the middle of a transfer: nobody computes with a mixture,
the others go on.
"""

import signal
import time

import pytest

from transport.errors import PeerGone
from transport.weights import ShardedWriter, WeightError

from ..sharded_programs import (
    BUCKET_BYTES,
    DEADLINE_S,
    HALVES,
    QUICK,
    WHOLE,
    serve,
    serve_and_stop_in_the_middle,
    train,
    train_and_stop_in_the_middle,
    values,
)
from ..sharded_rig import Group, until

either = pytest.mark.parametrize("writer", ["gloo", "shared_memory"], indirect=True)


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/w"


@pytest.fixture
def writer(address, request):
    backend = getattr(request, "param", "gloo")
    writer = ShardedWriter(
        WHOLE, 0, address, deadlines=QUICK, bucket_bytes=BUCKET_BYTES, backend=backend
    )
    yield writer
    writer.close()


def status(writer, name):
    return next((status for status in writer.readers if status.name == name), None)


def holds(writer, name, version) -> bool:
    found = status(writer, name)
    return found is not None and found.version == version


def publish(writer, version) -> None:
    writer.publish(version, values(WHOLE, 0, version))


@either
def test_a_reader_killed_in_the_middle_of_a_transfer_holds_nobody_up_and_its_successor_catches_up(
    start, address, writer
):
    victim = start(serve_and_stop_in_the_middle, address, "victim", WHOLE, 0, 9, signal.SIGKILL)
    other = start(serve, address, "other", WHOLE, 0, 3)
    publish(writer, 1)
    until(lambda: holds(writer, "victim", 1) and holds(writer, "other", 1))
    publish(writer, 2)
    victim.join(DEADLINE_S)
    assert victim.exitcode == -signal.SIGKILL
    until(lambda: holds(writer, "other", 2))
    successor = start(serve, address, "victim", WHOLE, 0, 3)
    until(lambda: holds(writer, "victim", 2))
    publish(writer, 3)
    for child in (other, successor):
        child.join(DEADLINE_S)
        assert child.exitcode == 0


def failure(writer) -> str:
    try:
        writer.poll()
    except (PeerGone, WeightError) as error:
        return str(error)
    return ""


def test_a_trainer_killed_amid_a_publish_leaves_the_old_version_and_a_new_one_is_followed(
    start, address
):
    trainer = start(train_and_stop_in_the_middle, address)
    group = Group(WHOLE, address, deadlines=QUICK)
    until(lambda: group.versions == {1}, group)
    trainer.join(DEADLINE_S)
    assert trainer.exitcode == -signal.SIGKILL
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        group.adopt()
        assert group.versions == {1}
        assert all(bool((tensor == 1).all()) for tensor in group.tensors[0].values())
        time.sleep(0.01)
    again = ShardedWriter(WHOLE, 0, address, deadlines=QUICK)
    publish(again, 1)
    publish(again, 2)
    until(lambda: group.versions == {2}, group)
    assert all(bool((tensor == 2).all()) for tensor in group.tensors[0].values())
    group.close()
    again.close()


def test_a_dead_trainer_rank_is_an_error_at_the_others_that_names_it(start, address):
    first = ShardedWriter(HALVES, 0, address, deadlines=QUICK)
    second = start(train, address, HALVES, 1, 1, 0.1)
    group = Group(WHOLE, address, deadlines=QUICK)
    first.publish(1, values(HALVES, 0, 1))
    until(lambda: group.versions == {1}, group)
    second.kill()

    def failure() -> str:
        try:
            first.poll()
        except PeerGone as error:
            return str(error)
        return ""

    until(lambda: "rank 1 of 2 is gone" in failure())
    assert group.versions == {1}
    group.close()
    first.close()


def test_a_trainer_rank_that_does_not_show_up_is_an_error_that_names_it(address):
    pace = type(QUICK)(heartbeat_s=0.05, form_s=0.3)
    first = ShardedWriter(HALVES, 0, address, deadlines=pace)

    def failure() -> str:
        try:
            first.poll()
        except PeerGone as error:
            return str(error)
        return ""

    until(lambda: "ranks [1] have not shown up" in failure())
    first.close()
