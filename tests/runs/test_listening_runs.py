"""Runs that listen at an address: with keys of their own, closed to everybody else, and nobody
notices who tries.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest
from rigs import stranger
from rigs.graphs import fake_graph

from dataflow import Graph, GraphError, inline, plan, run, scorer, verify
from dataflow.planning.hosts import Devices
from dataflow.runner import make_plan
from dataflow.scheduler import control
from dataflow.system.security import RunKeys
from dataflow.worker.host import Settings

ENDS = 3
"""Ports of a run of fakes with one scorer: of the scheduler, and of the edges to generator, scorer
and trainer."""
PATIENCE_S = 90.0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[RunKeys]:
    """The keys that are made."""
    found: list[RunKeys] = []
    make = RunKeys.make

    class Recorded(RunKeys):
        __slots__ = ()

        @classmethod
        def make(cls) -> RunKeys:
            found.append(make())
            return found[-1]

    monkeypatch.setattr(control, "RunKeys", Recorded)
    return found


@pytest.fixture
def attack(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Somebody tries every port of this process and its children as soon as the run is under
    way.
    """
    command = [sys.executable, stranger.__file__, str(os.getpid()), str(ENDS), "ready", "report"]
    child = subprocess.Popen(command, cwd=tmp_path)
    yield child
    child.kill()
    child.wait()


def held_up(folder: Path) -> Graph:
    """A run that does not end before the report is there."""

    @scorer(isolate=False)
    def judge(answer: str) -> float:
        (folder / "ready").touch()
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "report").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return 1.0

    return fake_graph(scorers=(judge,))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_strangers_are_refused_while_a_run_that_listens_goes_on(
    attack: "subprocess.Popen[bytes]", made: list[RunKeys], light: None, tmp_path: Path
) -> None:
    result = run(held_up(tmp_path), runs=tmp_path / "runs", quiet=True, listen="127.0.0.1")
    assert attack.wait(60) == 0
    report = json.loads((tmp_path / "report").read_text())
    assert len(report) >= ENDS
    for plain, keyed in report.values():
        assert not {"HANDSHAKE_SUCCEEDED", "ANSWERED"} & {*plain, *keyed}
        assert "CONNECTED" in plain
        assert "CONNECTED" in keyed
    assert (result.verdict.clean, result.steps) == (True, 8), result.verdict.line
    assert verify(result.folder).clean
    (keys,) = made
    written = b"".join(path.read_bytes() for path in result.folder.rglob("*") if path.is_file())
    for secret in (keys.receivers.secret, keys.senders.secret):
        assert secret not in written
        assert secret.hex().encode() not in written
    logs = "".join(path.read_text() for path in (result.folder / "logs").glob("*.log"))
    assert logs.count("refused a message on edge") <= ENDS, logs


def test_a_run_has_keys_of_its_own_where_it_listens_and_none_elsewhere(
    made: list[RunKeys], light: None, tmp_path: Path
) -> None:
    for listen, keys in (("127.0.0.1", 1), ("127.0.0.1", 2), ("", 2)):
        assert run(fake_graph(count=16), runs=tmp_path, quiet=True, listen=listen).verdict.clean
        assert len(made) == keys
    assert made[0] != made[1]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_worker_of_a_run_that_listens_is_found_again_after_a_restart(
    light: None, tmp_path: Path
) -> None:
    struck = tmp_path / "struck"

    @scorer(isolate=False)
    def judge(answer: str) -> float:
        if not struck.exists():
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    result = run(fake_graph(scorers=(judge,)), runs=tmp_path, quiet=True, listen="127.0.0.1")
    assert (result.verdict.clean, result.steps) == (True, 8), result.verdict.line


def test_settings_do_not_show_their_keys() -> None:
    keys = RunKeys.make()
    settings = Settings(folder="", listen="127.0.0.1", keys=keys.to_plain())
    shown = repr(settings) + repr(keys) + str(keys)
    for secret in (keys.receivers.secret, keys.senders.secret):
        assert secret.decode() not in shown
    assert RunKeys.from_plain(msgspec.convert(asdict(settings), Settings).keys) == keys


def test_an_address_of_another_machine_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"listen at '192\.0\.2\.1'.*address of this machine"):
        run(fake_graph(), runs=tmp_path, quiet=True, listen="192.0.2.1")
    with pytest.raises(GraphError, match="listens nowhere"):
        run(fake_graph(), on=inline(), runs=tmp_path, quiet=True, listen="127.0.0.1")
    assert list(tmp_path.iterdir()) == []


def test_the_plan_says_what_is_encrypted_and_what_is_not() -> None:
    said = make_plan(fake_graph(), listen="127.0.0.1").explain()
    assert "encrypted" in said
    assert "gloo and nccl on loopback, not encrypted" in said
    assert "listen" not in plan(fake_graph(), Devices(cpus=1)).explain()
