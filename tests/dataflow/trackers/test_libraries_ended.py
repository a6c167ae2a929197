"""Real libraries that write in threads of their own, whose process ends before the run does:
nothing is lost.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tracked_runs import STEPS, add
from wandb_files import history, needs_timed_writes, wandb_records

from dataflow.folder.run_folder import RunFolder
from dataflow.system.child import fork
from dataflow.trackers.process import Settling
from dataflow.trackers.tail import TrackerPlace
from dataflow.trackers.tracker import TrackedRun

Keep = Callable[..., Any]


pytestmark = pytest.mark.slow


@pytest.fixture(params=["wandb", "trackio"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    name = str(request.param)
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'dataflow-rl[{name}]'")
    place = tmp_path / "trackio"
    for variable, value in {
        "HOME": tmp_path,
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": place,
    }.items():
        monkeypatch.setenv(variable, str(value))
    if name == "trackio":
        import trackio.sqlite_storage  # noqa: F401

        for module in [each for name, each in sys.modules.items() if name.startswith("trackio")]:
            if hasattr(module, "TRACKIO_DIR"):
                monkeypatch.setattr(module, "TRACKIO_DIR", place)
    return name


def steps(library: str, folder: RunFolder) -> list[int]:
    """That it has, read as it reads them itself."""
    if library == "wandb":
        return [
            row["step"]
            for part in wandb_records(folder.path)
            for row in history(part)
            if "loss" in row
        ]
    from trackio.sqlite_storage import SQLiteStorage

    return [
        row["step"] for row in SQLiteStorage.get_logs("fakes", folder.path.name) if "loss" in row
    ]


def told(library: str, folder: RunFolder, keep: Keep) -> Any:
    """A keeper whose tracker has taken in all that there is, and maybe written nothing."""
    kept = keep(library)
    kept.until(lambda: kept.first.well_since is not None and kept.in_call(""))
    return kept


def test_trackers_that_stand_still_have_brought_out_all_that_they_took(
    library: str, folder: RunFolder, keep: Keep
) -> None:
    kept = told(library, folder, keep)
    kept.free, kept.now = 0, kept.now + 1.0
    kept.until(lambda: kept.first.process is None)
    assert steps(library, folder) == list(range(1, STEPS + 1))
    assert TrackerPlace.read_from(folder, library).read == folder.metrics.stat().st_size
    add(folder, STEPS + 1)
    kept.free, kept.now = 1 << 40, kept.now + 1.0
    kept.finish()
    assert steps(library, folder) == list(range(1, STEPS + 2))


def test_what_a_killed_tracker_may_not_have_written_is_told_again(
    library: str, folder: RunFolder, keep: Keep
) -> None:
    kept = told(library, folder, keep)
    os.kill(kept.first.process.pid, signal.SIGKILL)
    kept.until(lambda: kept.first.fails == 1)
    add(folder, STEPS + 1)
    kept.now += 10.0
    kept.finish()
    assert set(steps(library, folder)) == set(range(1, STEPS + 2))


def test_a_wandb_that_writes_by_32_kib_is_told_again_all_that_a_killed_process_took(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'dataflow-rl[wandb]'")
    from dataflow.trackers.libraries import wandb

    monkeypatch.setattr(wandb, "_FLUSH", "x_as_before_0_31")
    monkeypatch.setenv("HOME", str(folder.path.parent))

    def in_its_process() -> int:
        tracker = wandb.WandbTracker(mode="offline")
        tracker.start(
            TrackedRun(name="r", folder=folder.path, graph={"name": "g"}, config={}, goes_on=False)
        )
        now = 0.0
        settling = Settling(tracker.settles_s, lambda: now)
        settling.reached(TrackerPlace(read=10))
        now = 1e9
        tracker.close()
        return 0 if settling.certain() is None else 1

    assert fork(in_its_process).wait(60.0) == 0


def test_what_was_certain_is_not_told_again(library: str, folder: RunFolder, keep: Keep) -> None:
    if library == "wandb":
        needs_timed_writes()
    kept = told(library, folder, keep)
    kept.until(
        lambda: TrackerPlace.read_from(folder, library).read == folder.metrics.stat().st_size
    )
    os.kill(kept.first.process.pid, signal.SIGKILL)
    kept.until(lambda: kept.first.fails == 1)
    add(folder, STEPS + 1)
    kept.now += 10.0
    kept.finish()
    assert steps(library, folder) == list(range(1, STEPS + 2))
