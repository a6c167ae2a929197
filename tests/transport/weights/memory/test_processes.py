"""Between real processes, killed and frozen at the worst moments, no version is ever mixed."""

import os
import signal
import time
from contextlib import closing

import pytest

from transport.errors import PeerGone
from transport.weights import AddressTaken, SharedMemory, Timing, WeightReader, WeightWriter

from .. import programs
from ..conftest import leftovers, values
from ..programs import LAYOUT, PACE, model

pytestmark = pytest.mark.usefixtures("clean_shm")


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/w.sock"


@pytest.fixture
def writer(address):
    writer = WeightWriter(LAYOUT, address, pace=PACE)
    yield writer
    writer.close()


def until(writer, condition):
    """Poll the writer until the condition holds."""
    deadline = time.monotonic() + programs.DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, writer.readers
        writer.poll()
        time.sleep(0.001)


def publish(writer, version):
    writer.publish(version, model(version))
    until(writer, lambda: writer.pending is None)


def found(writer, name):
    return next((status for status in writer.readers if status.name == name), None)


def state(writer, name):
    return found(writer, name).state if found(writer, name) else None


def holds(writer, name, version):
    return found(writer, name) is not None and found(writer, name).version == version


def ended(child):
    return lambda: child.exitcode is not None


def test_no_reader_ever_serves_a_mixture_of_versions(start, writer, address):
    last = 50
    children = [
        start(programs.serve, address, f"r{n}", ["view", "copy", "view"][n], last) for n in range(3)
    ]
    until(writer, lambda: len(writer.readers) == 3)
    for version in range(1, last + 1):
        writer.publish(version, model(version))
    for child in children:
        until(writer, ended(child))
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert sum(writer.segments) <= 2 + len(children)


@pytest.mark.parametrize("adopt", ["view", "copy"])
def test_a_reader_killed_in_a_transfer_holds_nobody_up(start, address, adopt):
    endless = Timing(heartbeat_s=0.05, silent_s=0.5, release_s=1000.0)
    with closing(WeightWriter(LAYOUT, address, pace=endless)) as writer:
        victim = start(programs.linger, address, "victim", adopt, 100.0)
        other = start(programs.serve, address, "other", "view", 9)
        publish(writer, 1)
        until(writer, lambda: holds(writer, "other", 1) and state(writer, "victim") == "taking")
        os.kill(victim.pid, signal.SIGKILL)
        for version in range(2, 10):
            publish(writer, version)
        until(writer, ended(other))
        assert other.exitcode == 0
        assert writer.segments == (2, 0)


@pytest.mark.parametrize("moment", ["taking", "committed"])
def test_a_frozen_reader_is_fenced_and_rejoins_with_its_memory_intact(
    start, writer, address, moment
):
    if moment == "taking":
        frozen = start(programs.linger, address, "frozen", "view", 0.5)
    else:
        frozen = start(programs.serve, address, "frozen", "view", 9)
    other = start(programs.serve, address, "other", "view", 9)
    publish(writer, 1)
    until(writer, lambda: state(writer, "frozen") == moment and holds(writer, "other", 1))
    epoch = found(writer, "frozen").epoch
    os.kill(frozen.pid, signal.SIGSTOP)
    for version in range(2, 9):
        publish(writer, version)
        until(writer, lambda version=version: holds(writer, "other", version))
    assert writer.segments == (2, 1)
    assert found(writer, "frozen") is None
    os.kill(frozen.pid, signal.SIGCONT)
    until(writer, lambda: holds(writer, "frozen", 8))
    assert found(writer, "frozen").epoch > epoch
    publish(writer, 9)
    until(writer, ended(frozen))
    until(writer, ended(other))
    assert (frozen.exitcode, other.exitcode) == (0, 0)


def test_the_memory_left_to_a_frozen_reader_comes_back_when_it_dies(start, writer, address):
    frozen = start(programs.serve, address, "frozen", "view", 9)
    other = start(programs.serve, address, "other", "view", 3)
    publish(writer, 1)
    until(writer, lambda: holds(writer, "frozen", 1) and holds(writer, "other", 1))
    os.kill(frozen.pid, signal.SIGSTOP)
    publish(writer, 2)
    until(writer, lambda: holds(writer, "other", 2))
    publish(writer, 3)
    until(writer, ended(other))
    assert other.exitcode == 0
    assert writer.segments == (2, 1)
    os.kill(frozen.pid, signal.SIGKILL)
    until(writer, lambda: writer.segments == (2, 0))


def test_a_trainer_killed_in_a_publish_leaves_the_last_version_and_nothing_else(start, address):
    trainer = start(programs.publish_and_stop_in_the_middle, address)
    mine = model()
    with closing(WeightReader(address, "generator", pace=PACE)) as reader:
        reader.attach(mine)
        reader.wait(1, timeout_s=programs.DEADLINE_S)
        deadline = time.monotonic() + programs.DEADLINE_S
        while not reader.note and time.monotonic() < deadline:
            reader.poll()
        assert reader.note == {"half": "way"}
        with pytest.raises(AddressTaken, match=f"process {trainer.pid} alive"):
            SharedMemory(address).writer(lambda: None)
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.join(10)
        while reader.silent_s < PACE.silent_s:
            reader.poll()
        with pytest.raises(PeerGone, match="version 2; found no word from the writer"):
            reader.wait(2, timeout_s=0.2)
        assert reader.version == 1
        assert values(mine) == {1}
        stale = leftovers(address)
        assert len(stale) == 2
        with closing(WeightWriter(LAYOUT, address, pace=PACE)) as writer:
            assert not leftovers(address)
            writer.publish(1, model(7))
            deadline = time.monotonic() + programs.DEADLINE_S
            while values({"t0": mine["t0"]}) != {7} and time.monotonic() < deadline:
                writer.poll()
                if reader.poll():
                    reader.adopt()
            assert values(mine) == {7}
