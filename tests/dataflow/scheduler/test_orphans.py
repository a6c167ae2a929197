"""What killed runs leave in memory is removed; nothing is that a living process needs."""

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataflow.errors import RunError
from dataflow.folder import socket_folder
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.snapshot import SnapshotFile
from dataflow.folder.socket_folder import CONTROL
from dataflow.scheduler import execute
from dataflow.scheduler.orphans import clear, clear_all, remove
from dataflow.worker.kept_counts import KeptCounts, path_of


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What runs take for the machine's memory; short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="left-") as made:
        monkeypatch.setattr(socket_folder, "_MEMORY", Path(made))
        yield Path(made)


def killed(runs: Path, memory: Path) -> tuple[RunFolder, Path]:
    """A run of which only files are left."""
    folder, place = RunFolder.create(runs, "killed"), socket_folder.make()
    assert place.parent == memory
    socket_folder.mark(place, folder)
    (place / "weights").write_bytes(b"shared memory")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bound:
        bound.bind(str(place / "takeover"))
        bound.listen(1)
    folder.write_json(CONTROL, {"address": f"ipc://{place}/commands", "pid": 1})
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


def test_what_was_counted_when_all_was_killed_goes_to_the_run_folder(
    tmp_path: Path, memory: Path
) -> None:
    folder, place = killed(tmp_path, memory)
    folder.write_json("times.json", {"outcome": "not finished", "seconds": 3.0, "edges": {}})
    kept = KeptCounts(path_of(str(place), "a", 0), ["a>b:a"])
    kept.edges["a>b:a"].sent.add(2, 16, 900)
    before = {"a>b:a": {"sent": [1, 8, 100], "received": [1, 8, 100], "acknowledged": [1, 8, 100]}}
    SnapshotFile(place, {"begun": lambda: {"edges": before}}).write()
    assert clear(folder)
    found = folder.read_json("times.json")
    assert found["edges"] == {
        "a>b:a": {"sent": [3, 24, 1000], "received": [1, 8, 100], "acknowledged": [1, 8, 100]}
    }
    assert (found["outcome"], found["seconds"]) == ("not finished", 3.0)


def test_where_nothing_says_what_was_counted_before_the_run_folder_keeps_what_it_says(
    tmp_path: Path, memory: Path
) -> None:
    folder, place = killed(tmp_path, memory)
    folder.write_json("times.json", {"outcome": "not finished", "edges": {"a>b:a": 1}})
    KeptCounts(path_of(str(place), "a", 0), ["a>b:a"]).edges["a>b:a"].sent.add(2, 16, 900)
    assert clear(folder) and folder.read_json("times.json")["edges"] == {"a>b:a": 1}


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


def points_at(folder: RunFolder, place: Path | str) -> None:
    folder.write_json(CONTROL, {"address": f"ipc://{place}/commands", "pid": 1})


@pytest.mark.parametrize(
    "control",
    [
        ["no", "map"],
        {},
        *(
            {"address": each}
            for each in (
                "",
                "ipc:///dev/shm/commands",
                "tcp://127.0.0.1:5555",
                None,
                7,
                "ipc://\0/commands",
            )
        ),
    ],
)
def test_nothing_is_removed_where_the_run_folder_names_nothing(
    tmp_path: Path, memory: Path, control: object
) -> None:
    folder, place = killed(tmp_path, memory)
    folder.write_json(CONTROL, control)
    assert not clear(folder) and place.exists()


def elsewhere(place: Path, mine: RunFolder) -> Path:
    """A folder that looks like a run's in every way, in a place where runs make none."""
    made = place.parent.parent / f"{place.parent.name}-else" / place.name
    made.parent.mkdir(mode=0o700)
    shutil.copytree(place, made, ignore=shutil.ignore_patterns("takeover"))
    return made


def renamed(place: Path, mine: RunFolder) -> Path:
    return place.rename(place.with_name("dataflow-ranks-a1b2c3d4"))


def opened(place: Path, mine: RunFolder) -> Path:
    place.chmod(0o755)
    return place


def linked(place: Path, mine: RunFolder) -> Path:
    link = place.with_name("dataflow-a1b2c3d4")
    link.symlink_to(place)
    return link


def roundabout(place: Path, mine: RunFolder) -> Path:
    return Path(f"{place.parent}/{place.name}/../{place.name}")


def unmarked(place: Path, mine: RunFolder) -> Path:
    (place / "run").unlink()
    return place


def a_neighbours(place: Path, mine: RunFolder) -> Path:
    socket_folder.mark(place, RunFolder.create(mine.path.parent, "neighbour"))
    return place


def a_copys(place: Path, mine: RunFolder) -> Path:
    """As after `cp -r` of a run folder, or a run folder that came from another machine."""
    copy = mine.path.with_name("copy")
    mine.path.rename(copy)
    shutil.copytree(copy, mine.path)
    return place


def in_a_folder_of_all(place: Path, mine: RunFolder) -> Path:
    place.parent.chmod(0o777)
    return place


@pytest.mark.parametrize(
    "change",
    [
        elsewhere,
        renamed,
        opened,
        linked,
        roundabout,
        unmarked,
        a_neighbours,
        a_copys,
        in_a_folder_of_all,
    ],
)
def test_only_what_a_run_made_for_itself_where_it_makes_it_is_removed(
    tmp_path: Path, memory: Path, change: Callable[[Path, RunFolder], Path]
) -> None:
    folder, place = killed(tmp_path, memory)
    try:
        named = change(place, folder)
        points_at(folder, named)
        assert not clear(folder) and socket_folder.of(folder) is None
        assert (named / "weights").read_bytes() == b"shared memory"
    finally:
        shutil.rmtree(memory.parent / f"{memory.name}-else", ignore_errors=True)


def test_what_another_user_made_is_not_removed(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, place = killed(tmp_path, memory)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda uid=os.getuid(): uid + 1)
        assert not clear(folder)
    assert place.exists() and clear(folder)


def test_a_run_folder_that_was_moved_is_still_the_same(tmp_path: Path, memory: Path) -> None:
    folder, place = killed(tmp_path, memory)
    moved = RunFolder(folder.path.rename(tmp_path / "moved"))
    assert clear(moved) and not place.exists()


def test_workers_are_taken_over_only_where_the_run_itself_put_them(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, place = killed(tmp_path, memory)
    asked: list[Path] = []

    class NobodyThere:
        def __init__(self, place: Path) -> None:
            asked.append(place)
            raise RunError("no workers")

    monkeypatch.setattr(execute, "TakenOverControlServer", NobodyThere)
    unmarked(place, folder)
    assert execute.take(folder) is None and asked == []
    socket_folder.mark(place, folder)
    assert execute.take(folder) is None and asked == [place]


def test_all_killed_runs_of_a_folder_are_cleared_and_the_others_left(
    tmp_path: Path, memory: Path
) -> None:
    first, one = killed(tmp_path, memory)
    living, two = killed(tmp_path, memory)
    RunFolder.create(tmp_path, "inline")
    with (living.path / "lock").open("r+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert clear_all(tmp_path) == [first.path.name]
    assert not one.exists() and two.exists()
