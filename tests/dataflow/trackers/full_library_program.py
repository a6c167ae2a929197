"""A run told to a library that writes in threads of its own, whose disk runs full: python
full_library_program.py KIND LIBRARY FOLDER.

KIND: `for_a_while`: there is room again in the midst of the run; `at_once`: the same, and there was
no moment of little room before; `to_the_end`: there is room only when the run is over.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

from disks import Disk  # noqa: E402
from tracked_runs import STEPS, add, made  # noqa: E402
from wandb_files import history, wandb_records  # noqa: E402

from dataflow.folder.run_folder import RunFolder  # noqa: E402
from dataflow.limits import Limits  # noqa: E402
from dataflow.trackers import children  # noqa: E402
from dataflow.trackers.children import TrackersOfRun  # noqa: E402
from dataflow.trackers.chosen import choose  # noqa: E402
from dataflow.trackers.command import track_run  # noqa: E402
from dataflow.trackers.tail import TrackerPlace  # noqa: E402
from dataflow.trackers.tracker import SPARE_BYTES  # noqa: E402

LIMITS = Limits(track_s=60.0, track_again_s=0.5)
DEADLINE_S = 120.0
MORE = 10
"""Steps that are made while it is full, and as many when it is not any more."""


def until(of_run: TrackersOfRun, holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        of_run.look()
        assert time.monotonic() < deadline, f"{what} did not come about within {DEADLINE_S:.0f} s"
        time.sleep(0.05)


def main() -> None:
    """The steps; then what was told."""
    kind, name, root = sys.argv[1], sys.argv[2], Path(sys.argv[3]).resolve()
    (root / "home").mkdir()
    os.environ |= {
        "HOME": str(root / "home"),
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(root / "trackio"),
    }
    folder = made(root)
    disk = Disk(folder.path / "wandb" if name == "wandb" else root / "trackio", 2 * SPARE_BYTES)
    of_run = TrackersOfRun(folder, choose([name]), LIMITS)
    steps = iter(range(STEPS + 1, STEPS + 1 + 2 * MORE))

    def make() -> None:
        for _ in range(MORE):
            add(folder, next(steps))

    def said() -> list[str]:
        """To the user, of the tracker."""
        lines = (folder.logs / "trackers.log").read_text().splitlines()
        return [text for text in lines if text.startswith("tracker ")]

    def is_told() -> bool:
        """All that there is, and that is certain."""
        return TrackerPlace.read_from(folder, name).read == folder.metrics.stat().st_size

    until(of_run, is_told, "that the first steps are told")
    disk.fill(leaves=0 if kind == "at_once" else SPARE_BYTES // 2)
    make()
    until(of_run, said, "that the failure is said")
    disk.fill()
    if kind != "to_the_end":
        disk.make_room()
    make()
    if kind != "to_the_end":
        until(of_run, is_told, "that all is told, while the run goes on")
    of_run.end("finished", print)
    words = said()
    assert (
        f"tracker {name} failed in 'log': OSError: [Errno 28] No space left on device: " in words[0]
    ), words
    assert len(words) == 1 + (kind == "to_the_end"), words
    if kind == "to_the_end":
        assert f"lacks the end of the run: dataflow track {folder.path} --to {name}" in words[1], (
            words
        )
        disk.make_room()
        assert track_run(folder.path, to=(name,)) == 0
    told = READ[name](folder)
    assert told == list(range(1, STEPS + 2 * MORE + 1)), told


def steps_of_wandb(folder: RunFolder) -> list[int]:
    return [
        row["step"] for part in wandb_records(folder.path) for row in history(part) if "loss" in row
    ]


def steps_of_trackio(folder: RunFolder) -> list[int]:
    from trackio.sqlite_storage import SQLiteStorage

    return [
        row["step"] for row in SQLiteStorage.get_logs("fakes", folder.path.name) if "loss" in row
    ]


READ: dict[str, Callable[[RunFolder], list[int]]] = {
    "wandb": steps_of_wandb,
    "trackio": steps_of_trackio,
}

if __name__ == "__main__":
    children.STEPS_BACK = False
    main()
