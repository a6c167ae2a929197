"""What killed runs leave in memory is removed; nothing is that a living process needs."""

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataflow.command import FILE
from dataflow.left_behind import clear, clear_all, remove
from dataflow.run_folder import RunFolder


@pytest.fixture
def memory() -> Iterator[Path]:
    """Short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="left-") as made:
        yield Path(made)


def killed(runs: Path, memory: Path, name: str = "dataflow-a") -> tuple[RunFolder, Path]:
    """A run of which only files are left."""
    folder, place = RunFolder.create(runs, "killed"), memory / name
    place.mkdir(mode=0o700)
    (place / "weights").write_bytes(b"shared memory")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bound:
        bound.bind(str(place / "door"))
        bound.listen(1)
    folder.write_json(FILE, {"address": f"ipc://{place}/commands", "pid": 1})
    (folder.path / "lock").write_text("1")
    return folder, place


def test_what_a_killed_run_left_is_removed_once(tmp_path: Path, memory: Path) -> None:
    folder, place = killed(tmp_path, memory)
    assert clear(folder) and not place.exists()
    assert not clear(folder)


def test_what_a_run_needs_of_which_any_process_lives_stays(tmp_path: Path, memory: Path) -> None:
    folder, place = killed(tmp_path, memory)
    handle = os.open(folder.path / "lock", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert not clear(folder) and (place / "weights").exists()
    os.close(handle)
    assert clear(folder)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_folder_stays_in_which_somebody_listens_and_he_takes_no_notice(
    tmp_path: Path, memory: Path, kind: socket.SocketKind
) -> None:
    folder, place = killed(tmp_path, memory)
    with socket.socket(socket.AF_UNIX, kind) as listening:
        listening.bind(str(place / "commands"))
        listening.listen(1)
        listening.setblocking(False)
        assert not remove(folder) and (place / "weights").exists()
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert remove(folder)


@pytest.mark.parametrize("address", ["", "ipc:///dev/shm/commands", "tcp://127.0.0.1:5555", None, 7])
def test_no_other_folder_is_removed_whatever_the_run_folder_says(tmp_path: Path, memory: Path, address: object) -> None:
    folder, place = killed(tmp_path, memory)
    folder.write_json(FILE, {"address": address})
    assert not clear(folder) and place.exists()
    folder.write_json(FILE, ["no", "map"])
    assert not clear(folder)
    other = memory / "somebody-s"
    place.rename(other)
    folder.write_json(FILE, {"address": f"ipc://{other}/commands"})
    assert not clear(folder) and other.exists()
    (memory / "dataflow-link").symlink_to(other)
    folder.write_json(FILE, {"address": f"ipc://{memory}/dataflow-link/commands"})
    assert not clear(folder) and (other / "weights").exists()


def test_all_killed_runs_of_a_folder_are_cleared_and_the_others_left(tmp_path: Path, memory: Path) -> None:
    first, one = killed(tmp_path, memory, "dataflow-a")
    living, two = killed(tmp_path, memory, "dataflow-b")
    RunFolder.create(tmp_path, "inline")
    with (living.path / "lock").open("r+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert clear_all(tmp_path) == [first.path.name]
    assert not one.exists() and two.exists()
