"""Fixtures of the tests of whole runs."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
if str(ROOT) not in sys.path:  # before this folder, whose `dataflow` would be found as a package without a file
    sys.path.insert(0, str(ROOT))

from dataflow import worker  # noqa: E402
from dataflow.plan import Devices  # noqa: E402
from rigs.machine import nothing_left_behind  # noqa: E402
from rigs.policy import tiny_policy  # noqa: E402


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny policy with random weights."""
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are planned for one core: one thread each, whatever else this machine has to do."""
    monkeypatch.setattr(sys.modules["dataflow.run"], "this_machine", lambda: Devices(cpus=1))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the test when a run leaves a process, a socket or shared memory behind."""
    tmp_path_factory.getbasetemp()  # is where the temporary files were until now
    temporary = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    try:
        with nothing_left_behind(temporary):
            yield
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch, machine: None) -> None:
    """For runs of fakes in processes: the forkserver imports no torch."""
    monkeypatch.setattr(worker, "preload", lambda: None)
