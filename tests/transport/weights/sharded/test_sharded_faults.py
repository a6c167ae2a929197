"""Ranks killed, frozen and restarted in the middle of a transfer: nobody computes with a mixture,
the others go on.
"""

import os
import signal
import time

import pytest

from transport.errors import PeerGone
from transport.weights import AddressTaken, ShardedWriter, WeightError

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


@pytest.mark.parametrize("back_s", [0, 3600], ids=["right", "an hour back"])
def test_of_two_readers_of_one_name_the_later_attempt_serves_whatever_its_clock_says(
    address, writer, monkeypatch, back_s
):
    first = Group(WHOLE, address, deadlines=QUICK, attempt=3)
    publish(writer, 1)
    until(lambda: first.versions == {1}, first)
    for name in ("time", "time_ns", "monotonic_ns"):
        unit = 10**9 if name.endswith("_ns") else 1
        monkeypatch.setattr(
            time, name, lambda read=getattr(time, name), unit=unit: read() - back_s * unit
        )
    second = Group(WHOLE, address, deadlines=QUICK, attempt=4)
    until(lambda: second.versions == {1}, second)
    publish(writer, 2)
    until(lambda: second.versions == {2}, second)
    with pytest.raises(AddressTaken, match="fenced off for good"):
        until(lambda: False, first, second)
    assert first.versions == {1}
    first.close()
    second.close()


def test_a_trainer_rank_of_an_earlier_attempt_never_takes_its_place_back(address, monkeypatch):
    first = ShardedWriter(HALVES, 0, address, deadlines=QUICK, attempt=2)
    second = ShardedWriter(HALVES, 1, address, deadlines=QUICK, attempt=2)
    group = Group(WHOLE, address, deadlines=QUICK)

    def published(version):
        first.publish(version, values(HALVES, 0, version))
        second.publish(version, values(HALVES, 1, version))
        until(lambda: (first.poll(), second.poll(), group.versions == {version})[2], group)

    published(1)
    monkeypatch.setattr(time, "time_ns", lambda now=time.time_ns: now() + 3600 * 10**9)
    late = ShardedWriter(HALVES, 1, address, deadlines=QUICK, attempt=1)
    until(lambda: "was there before" in failure(late), group)
    published(2)
    for one in (late, group, second, first):
        one.close()


def failure(writer) -> str:
    try:
        writer.poll()
    except (PeerGone, WeightError) as error:
        return str(error)
    return ""


@either
def test_a_frozen_reader_loses_its_epoch_and_catches_up_when_it_wakes(start, address, writer):
    frozen = start(serve_and_stop_in_the_middle, address, "frozen", WHOLE, 0, 4, signal.SIGSTOP)
    other = start(serve, address, "other", WHOLE, 0, 4)
    publish(writer, 1)
    until(lambda: holds(writer, "frozen", 1) and holds(writer, "other", 1))
    epoch = status(writer, "frozen").epoch
    for version in (2, 3):
        publish(writer, version)
        until(lambda version=version: holds(writer, "other", version))
    until(lambda: status(writer, "frozen") is None or status(writer, "frozen").epoch != epoch)
    os.kill(frozen.pid, signal.SIGCONT)
    until(lambda: holds(writer, "frozen", 3))
    publish(writer, 4)
    for child in (frozen, other):
        child.join(DEADLINE_S)
        assert child.exitcode == 0


@either
def test_one_rank_killed_in_the_middle_takes_no_other_rank_with_it(start, address, writer):
    stays = start(serve, address, "pair", HALVES, 0, 3)
    victim = start(serve_and_stop_in_the_middle, address, "pair", HALVES, 1, 9, signal.SIGKILL)
    publish(writer, 1)
    until(lambda: holds(writer, "pair", 1))
    publish(writer, 2)
    victim.join(DEADLINE_S)
    successor = start(serve, address, "pair", HALVES, 1, 3)
    until(lambda: holds(writer, "pair", 2))
    publish(writer, 3)
    for child in (stays, successor):
        child.join(DEADLINE_S)
        assert child.exitcode == 0


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


@pytest.mark.slow
def test_fifty_groups_join_and_leave_while_versions_go_out(address, writer):
    stays = Group(WHOLE, address, "stays", deadlines=QUICK)
    version = 0
    for number in range(50):
        version += 1
        publish(writer, version)
        guest = Group(
            HALVES if number % 2 else WHOLE, address, f"guest-{number % 3}", deadlines=QUICK
        )
        if number % 3:
            until(lambda guest=guest: min(guest.versions) >= 0, guest, stays)
            for mine, reader in zip(guest.tensors, guest.readers, strict=True):
                assert all(bool((tensor == reader.version).all()) for tensor in mine.values())
        guest.close()
    publish(writer, version + 1)
    until(lambda: stays.versions == {version + 1}, stays)
    until(lambda: [status.name for status in writer.readers] == ["stays"])
    stays.close()
