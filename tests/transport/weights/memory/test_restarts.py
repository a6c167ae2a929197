"""Trainer and generators of one machine, killed at every moment and started again: who serves what
afterwards.
"""

import os
import signal
import time

import pytest

from transport.weights import WeightWriter

from ..conftest import leftovers
from ..programs import DEADLINE_S, LAYOUT, PACE, model
from ..restart_programs import GENERATOR_DIES, LINE, REPLACED, TRAINER_DIES, generate, served, train

pytestmark = pytest.mark.usefixtures("clean_shm")


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/w.sock"


@pytest.fixture
def writer(address):
    writer = WeightWriter(LAYOUT, address, pace=PACE)
    yield writer
    writer.close()


def ends(child):
    child.join(DEADLINE_S)
    return child.exitcode


def until(condition, writer=None):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        if writer is not None:
            writer.poll()
        time.sleep(0.001)


def publish(writer, version, line=0):
    writer.publish(version, model(LINE * line + version))
    until(lambda: writer.pending is None, writer)


def holds(writer, name, version):
    return any((status.name, status.version) == (name, version) for status in writer.readers)


@pytest.mark.parametrize("moment", [*TRAINER_DIES, "adopted"])
def test_after_a_trainer_is_killed_every_generator_serves_what_its_successor_has(
    start, address, tmp_path, moment
):
    names = ["view", "copy"]
    generators = [start(generate, address, name, name, (1, 2), tmp_path) for name in names]
    assert ends(start(train, address, 0, [1, 2], names, moment)) == -signal.SIGKILL
    assert ends(start(train, address, 1, [1, 2], names)) == 0
    assert [ends(generator) for generator in generators] == [0, 0]
    for name in names:
        assert served(tmp_path, name) in (
            [(0, 1), (1, 1), (1, 2)],
            [(0, 1), (0, 2), (1, 1), (1, 2)],
        )
        if moment not in ("offered", "adopted"):
            assert (0, 2) not in served(tmp_path, name)
        if moment == "adopted":
            assert (0, 2) in served(tmp_path, name)


@pytest.mark.parametrize("moment", GENERATOR_DIES)
def test_a_generator_killed_at_any_moment_is_followed_by_one_that_serves_the_newest_version_alone(
    start, writer, address, tmp_path, moment
):
    victim = start(generate, address, "victim", "view", (0, 9), tmp_path, moment)
    other = start(generate, address, "other", "copy", (0, 4), tmp_path)
    publish(writer, 1)
    until(lambda: holds(writer, "victim", 1) and holds(writer, "other", 1), writer)
    publish(writer, 2)
    until(lambda: victim.exitcode is not None, writer)
    assert victim.exitcode == -signal.SIGKILL
    before = len(served(tmp_path, "victim"))
    publish(writer, 3)
    successor = start(generate, address, "victim", "view", (0, 4), tmp_path)
    until(lambda: holds(writer, "victim", 3) and holds(writer, "other", 3), writer)
    publish(writer, 4)
    until(lambda: other.exitcode is not None and successor.exitcode is not None, writer)
    assert (other.exitcode, successor.exitcode) == (0, 0)
    assert served(tmp_path, "victim")[before:] == [(0, 3), (0, 4)]
    assert writer.segments == (2, 0)


def test_generators_killed_again_and_again_cost_the_trainer_no_memory_and_no_wait(
    start, address, writer, tmp_path
):
    for version in range(1, 9):
        publish(writer, version)
        generator = start(generate, address, "generator", "view", (0, 99), tmp_path)
        until(lambda version=version: holds(writer, "generator", version), writer)
        until(lambda version=version: (0, version) in served(tmp_path, "generator"), writer)
        os.kill(generator.pid, signal.SIGKILL)
        assert ends(generator) == -signal.SIGKILL
        assert len(leftovers(address)) <= 2
    publish(writer, 9)
    assert writer.segments == (2, 0)
    until(lambda: not writer.readers, writer)
    assert served(tmp_path, "generator") == [(0, version) for version in range(1, 9)]


def test_a_frozen_generator_that_wakes_behind_its_successor_ends_and_leaves_it_alone(
    start, address, writer, tmp_path
):
    frozen = start(generate, address, "generator", "view", (0, 9), tmp_path)
    publish(writer, 1)
    until(lambda: holds(writer, "generator", 1), writer)
    os.kill(frozen.pid, signal.SIGSTOP)
    successor = start(generate, address, "generator", "copy", (0, 4), tmp_path)
    for version in (2, 3):
        publish(writer, version)
        until(lambda version=version: holds(writer, "generator", version), writer)
    os.kill(frozen.pid, signal.SIGCONT)
    until(lambda: frozen.exitcode is not None, writer)
    assert frozen.exitcode == REPLACED
    publish(writer, 4)
    until(lambda: successor.exitcode is not None, writer)
    assert successor.exitcode == 0


@pytest.mark.slow
def test_a_generator_that_sleeps_through_the_trainers_restart_wakes_with_the_new_ones_version(
    start, address, tmp_path
):
    frozen = start(generate, address, "frozen", "view", (2, 1), tmp_path)
    other = start(generate, address, "other", "view", (1, 2), tmp_path)
    trainer = start(train, address, 0, [1, 2, 3], ["frozen", "other"])
    until(lambda: served(tmp_path, "frozen") and served(tmp_path, "other"))
    os.kill(frozen.pid, signal.SIGSTOP)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.join(DEADLINE_S)
    again = start(train, address, 1, [1, 2], ["other"])
    assert (ends(again), ends(other)) == (0, 0)
    third = start(train, address, 2, [1], ["frozen"])
    os.kill(frozen.pid, signal.SIGCONT)
    assert (ends(third), ends(frozen)) == (0, 0)
    assert served(tmp_path, "frozen") == [(0, 1), (2, 1)]


@pytest.mark.slow
def test_a_trainer_that_sleeps_longer_than_any_deadline_goes_on_with_its_generators(
    start, address, tmp_path
):
    generator = start(generate, address, "generator", "view", (0, 60), tmp_path)
    trainer = start(train, address, 0, range(1, 61), ["generator"])
    until(lambda: len(served(tmp_path, "generator")) > 5)
    os.kill(trainer.pid, signal.SIGSTOP)
    time.sleep(4 * PACE.silent_s)
    os.kill(trainer.pid, signal.SIGCONT)
    assert (ends(generator), ends(trainer)) == (0, 0)
    assert served(tmp_path, "generator") == [(0, version) for version in range(1, 61)]
