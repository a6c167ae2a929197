"""What a scheduler leaves for its successor: the newest, whole, written when something changed."""

import time
from pathlib import Path

import pytest

from dataflow.errors import RunError
from dataflow.folder.snapshot import FILE, SnapshotFile, read
from dataflow.scheduler.control_server import HostsControlServer, TakenOverControlServer
from dataflow.scheduler.execute import Taken
from dataflow.system.clocks import RunClock
from dataflow.system.files import RunFolderError


def test_the_newest_is_read_whole_and_only_what_changed_is_written(tmp_path: Path) -> None:
    found: dict[str, object] = {"step": 1}
    snapshot = SnapshotFile(
        tmp_path, {"table": lambda: found, "begun": lambda: [1.5, None]}, clock=lambda: 7.0
    )
    snapshot.write()
    first = (tmp_path / FILE.format(0)).stat().st_ino
    snapshot.write()
    assert (tmp_path / FILE.format(0)).stat().st_ino == first
    found["step"] = 2
    snapshot.write()
    assert (tmp_path / FILE.format(0)).stat().st_ino != first
    assert read(tmp_path) == {"table": {"step": 2}, "begun": [1.5, None], "at": 7.0}
    assert [path.name for path in tmp_path.iterdir()] == [FILE.format(0)]


def test_a_folder_that_is_gone_is_told_once_for_each_change(tmp_path: Path) -> None:
    found = {"step": 1}
    snapshot = SnapshotFile(tmp_path / "gone", {"table": lambda: found})
    for _ in range(2):
        with pytest.raises(RunFolderError):
            snapshot.write()
        snapshot.write()
        found["step"] += 1


@pytest.mark.parametrize("content", [None, b"", b'{"table": '])
def test_what_is_no_whole_snapshot_is_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / FILE.format(0)).write_bytes(content)
    with pytest.raises(RunError, match="left nothing to go on with"):
        read(tmp_path)


@pytest.mark.parametrize("ahead_s", [-86_400.0, 0.0, 86_400.0])
def test_the_clock_of_a_run_over_hosts_goes_on_where_it_stood_on_whichever_host(
    ahead_s: float,
) -> None:
    server = HostsControlServer.__new__(HostsControlServer)
    server.alone_s = 5.0
    left = {"at": time.monotonic() + ahead_s, "away_s": 3.0}
    clock = RunClock(Taken(server=server, snapshot=left).away_s)
    assert clock() - left["at"] == pytest.approx(5.0, abs=1.0)


def test_the_clock_of_a_run_on_one_machine_is_the_machine_s_without_its_pauses() -> None:
    server = TakenOverControlServer.__new__(TakenOverControlServer)
    assert Taken(server=server, snapshot={"at": 0.0, "away_s": 3.0}).away_s == 3.0
