"""Readers of one host take a trainer's versions once over the network, and hand them to each other through memory."""

import contextlib
import os
from pathlib import Path

import pytest

from transport.security import RunKeys
from transport.weights.mirror import choice

from .rig import holds, neighbour, offered, until


@pytest.fixture(scope="module")
def keys() -> RunKeys:
    return RunKeys.make()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "SILENT_S", 0.6)
    monkeypatch.setattr(choice, "APART_S", 0.2)


@contextlib.contextmanager
def neighbours(keys, address, folder, count=3, **knobs):
    made = [neighbour(keys, address, folder, number, **knobs) for number in range(count)]
    try:
        yield [reader for reader, _ in made], [mine for _, mine in made]
    finally:
        for reader, _ in made:
            reader.close()


def test_one_reader_takes_each_version_over_the_network_and_all_hold_it(keys, folder):
    with offered(keys) as (trainer, address), neighbours(keys, address, folder) as (readers, mine):
        for version in range(1, 6):
            trainer.publish(version)
            until(lambda version=version: {each.version for each in readers} == {version}, *readers)
            assert all(holds(each, version) for each in mine)
        assert [each.leads for each in readers] == [True, False, False], "the first by the plan's order"
        coordinator = trainer.writers[0]
        assert list(coordinator.sent) == ["generator-0"]
        size = sum(tensor.nbytes for tensor in mine[0].values())
        until(lambda: coordinator.sent["generator-0"].behind == {"generator-1": 5, "generator-2": 5}, *readers)
        sent, whole = coordinator.traffic
        assert sent == 5 * size and whole > sent, "what the neighbours did not ask for counts as saved"
