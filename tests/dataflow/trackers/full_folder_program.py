"""Trackers of a run whose own folder has no room: python full_folder_program.py KIND FOLDER.

KIND: `a_moment`: while it is kept how far a tracker has come; `until_it_is_killed`: the same, and
then the tracker's process is killed; `all_of_it`: the whole folder, before its trackers have
said anything.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

from bad_trackers import Steps  # noqa: E402
from disks import Disk  # noqa: E402
from tracked_runs import STEPS, add, made  # noqa: E402

from dataflow.folder.run_folder import RunFolder  # noqa: E402
from dataflow.limits import Limits  # noqa: E402
from dataflow.trackers import children  # noqa: E402
from dataflow.trackers.children import TrackersOfRun  # noqa: E402
from dataflow.trackers.chosen import choose  # noqa: E402
from dataflow.trackers.tail import FOLDER, TrackerPlace  # noqa: E402

DEADLINE_S = 120.0
LIMITS = Limits(track_s=60.0, track_again_s=0.5)


def until(of_run: TrackersOfRun, holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        of_run.look()
        assert time.monotonic() < deadline, f"{what} did not come about within {DEADLINE_S:.0f} s"
        time.sleep(0.05)


def told(folder: RunFolder) -> list[str]:
    path = folder.path / "steps.txt"
    return path.read_text().splitlines() if path.exists() else []


def kept(folder: RunFolder) -> int:
    return TrackerPlace.read_from(folder, "Steps").read


def make(of_run: TrackersOfRun, folder: RunFolder, step: int) -> None:
    """One step more, and wait until the tracker is told it."""
    add(folder, step)
    until(of_run, lambda: told(folder)[-1:] == [f"step {step}"], f"step {step}")


def where_it_is_kept(root: Path, is_killed: bool) -> None:
    """Only the folder of trackers' places is full: the run's disk has room, as trackers have none
    otherwise.
    """
    folder = made(root)
    disk = Disk(folder.path / FOLDER, 64 << 10)
    of_run, said = TrackersOfRun(folder, choose([Steps]), LIMITS), list[str]()
    until(
        of_run,
        lambda: kept(folder) == folder.metrics.stat().st_size,
        "that it is kept that all is told",
    )
    before = kept(folder)
    disk.fill()
    for step in (STEPS + 1, STEPS + 2):
        make(of_run, folder, step)
    time.sleep(1.0)  # until it has tried to keep that
    assert kept(folder) == before, "what was kept stays whole"
    again: list[str] = []
    if is_killed:
        os.kill(pid_of_teller(folder), signal.SIGKILL)
        again = ["start again", f"step {STEPS + 1}", f"step {STEPS + 2}"]
        until(
            of_run,
            lambda: told(folder)[-3:] == again,
            "that the next process tells what was not kept",
        )
    disk.make_room()
    make(of_run, folder, STEPS + 3)
    until(of_run, lambda: kept(folder) == folder.metrics.stat().st_size, "that it is kept again")
    of_run.end("finished", said.append)
    said = [
        text
        for text in (folder.logs / "trackers.log").read_text().splitlines()
        if text.startswith("tracker ")
    ]
    assert len(said) == is_killed, said
    steps = [f"step {step}" for step in range(1, STEPS + 3)]
    assert told(folder) == ["start new", *steps, *again, f"step {STEPS + 3}", "finish finished"], (
        told(folder)
    )


def pid_of_teller(folder: RunFolder) -> int:
    """The process that has the tracker, by its lock."""
    lock = str(folder.path / FOLDER / "Steps.lock")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(each.readlink()) == lock for each in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue
    raise AssertionError(f"nobody holds {lock}")


def all_of_it(root: Path) -> None:
    """The log of trackers is on that disk; there is less than a tracker may use anyway."""
    disk = Disk(root / "disk", 4 << 20)
    folder = made(disk.path)
    disk.fill()
    of_run, said = TrackersOfRun(folder, choose([Steps]), LIMITS), list[str]()
    until(of_run, lambda: said.extend(of_run.look()) or said, "that somebody says so")
    assert "trackers stand still" in said[0], said
    of_run.end("finished", said.append)
    assert (
        "stood still for want of room; it lacks the end of the run: dataflow track" in said[-1]
    ), said
    assert told(folder) == [], "on a disk that the run needs"
    elsewhere = root / "copy"
    disk.make_room()
    shutil.copytree(folder.path, elsewhere)
    again = TrackersOfRun(RunFolder.open(elsewhere), choose([Steps]), LIMITS)
    again.end("finished", said.append)
    assert told(RunFolder.open(elsewhere)) == [
        "start new",
        *(f"step {step}" for step in range(1, STEPS + 1)),
        "finish finished",
    ]


if __name__ == "__main__":
    children.STEPS_BACK = False
    kind, place = sys.argv[1], Path(sys.argv[2]).resolve()
    if kind == "all_of_it":
        all_of_it(place)
    else:
        where_it_is_kept(place, is_killed=kind == "until_it_is_killed")
