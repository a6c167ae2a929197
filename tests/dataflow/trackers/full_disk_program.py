"""A run whose tracker's disk runs full: python full_disk_program.py KIND TRACKER FOLDER POLICY.

KIND: `for_a_while`: there is room again in the midst of the run; `to_the_end`: only when that is
over.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

from bad_trackers import Bulky  # noqa: E402
from disks import Disk  # noqa: E402
from rigs.graphs import tiny_graph  # noqa: E402

from dataflow import inline, run, scorer  # noqa: E402
from dataflow.folder.run_folder import RunFolder  # noqa: E402
from dataflow.limits import Limits  # noqa: E402
from dataflow.scheduler import execute  # noqa: E402
from dataflow.trackers import (  # noqa: E402
    MlflowTracker,
    TensorboardTracker,
    Tracker,
    children,
)
from dataflow.trackers.command import track_run  # noqa: E402
from dataflow.trackers.tail import TrackerPlace  # noqa: E402

STEPS, FULL, NOTICED, FREE, CAUGHT_UP = 30, 2, 20, 24, 27
"""When the disk runs full; by when that was said; when there is room; by when the tracker has
caught up."""
SIZES = {"Bulky": 1 << 20, "tensorboard": 1 << 20, "mlflow": 64 << 20, "mlflow files": 4 << 20}
STORES: dict[str, Callable[[Disk], str]] = {
    "mlflow": lambda disk: f"sqlite:///{disk.path}/mlflow.db",
    "mlflow files": lambda disk: f"file://{disk.path}/mlruns",
}
DEADLINE_S = 120.0


class Course:
    """What happens at which step, as a scorer sees it, which each step waits for."""

    def __init__(self, disk: Disk, runs: Path, name: str, is_full_to_the_end: bool) -> None:
        self._disk, self._runs, self._name = disk, runs, name
        self._left: list[tuple[int, Callable[[], None]]] = [
            (FULL, self._fill),
            (NOTICED, self._notice),
        ]
        if not is_full_to_the_end:
            self._left += [(FREE, self._make_room), (CAUGHT_UP, self._catch_up)]

    @property
    def is_over(self) -> bool:
        return not self._left

    @property
    def folder(self) -> RunFolder:
        return RunFolder.open((self._runs / "latest").resolve())

    @property
    def said(self) -> list[str]:
        """To the user, of trackers."""
        return (self.folder.logs / "trackers.log").read_text().splitlines()

    def look(self) -> None:
        """Before each rollout's score."""
        made = self._lines()
        while self._left and made >= self._left[0][0]:
            self._left.pop(0)[1]()

    def _lines(self) -> int:
        return self.folder.metrics.read_bytes().count(b"\n") if self.folder.metrics.exists() else 0

    def _told(self) -> int:
        return TrackerPlace.read_from(self.folder, self._name.split()[0]).read

    def _fill(self) -> None:
        until(lambda: self._told() > 0, "that the tracker is told the first steps")
        self._disk.fill()

    def _notice(self) -> None:
        until(lambda: any(" failed in " in text for text in self.said), "that the failure is said")

    def _make_room(self) -> None:
        assert self._told() < self.folder.metrics.stat().st_size, (
            "steps were made while it was told none"
        )
        self._disk.make_room()

    def _catch_up(self) -> None:
        size = self.folder.metrics.stat().st_size
        until(
            lambda: self._told() >= size,
            "that the tracker is told all that there is, while the run goes on",
        )


class Watched(children.TrackersOfRun):
    """Is looked at also while the run waits for the course of things."""

    last: "Watched"

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        Watched.last = self


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        Watched.last.look()
        assert time.monotonic() < deadline, f"{what} did not come about within {DEADLINE_S:.0f} s"
        time.sleep(0.05)


def tracker_on(disk: Disk, name: str) -> Tracker:
    """That writes all that it writes to the disk."""
    if name == "tensorboard":
        return TensorboardTracker(folder=str(disk.path))
    return MlflowTracker(uri=STORES[name](disk)) if name in STORES else Bulky()


def main() -> None:
    """The run; then what was told."""
    kind, name, folder, policy = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    children.STEPS_BACK = False
    execute.TrackersOfRun = Watched  # type: ignore[misc]
    disk = Disk(folder / "disk", SIZES[name])
    os.environ["BULKY"] = str(disk.path / "bulky")
    course = Course(disk, folder / "runs", name, is_full_to_the_end=kind == "to_the_end")

    @scorer(isolate=False)
    def reward(completion: str) -> float:
        course.look()
        return sum(letter in "abcdefgh" for letter in completion) / max(1, len(completion))

    result = run(
        tiny_graph(policy, max_staleness=0, max_tokens=8, scorers=(reward,)),
        steps=STEPS,
        on=inline(),
        runs=folder / "runs",
        quiet=True,
        track=[tracker_on(disk, name)],
        limits=Limits(track_s=60.0, track_again_s=1.0),
    )
    assert result.verdict.clean and result.steps == STEPS and course.is_over, result.verdict.line
    said = [text for text in course.said if text.startswith("tracker ")]
    assert " failed in " in said[0] and ("No space left" in said[0] or "disk is full" in said[0]), (
        said
    )
    if kind == "to_the_end":
        assert (
            len(said) == 2
            and f"lacks the end of the run: dataflow track {result.folder} --to" in said[1]
        ), said
        disk.make_room()
        assert track_run(result.folder, to=(said[1].rpartition(" --to ")[2].split()[0],)) == 0
    else:
        assert len(said) == 1, said
    if name in STORES:
        read_mlflow(STORES[name](disk))
    else:
        READ[name](disk, result.folder)


def read_bulky(disk: Disk, run: Path) -> None:
    told = (disk.path / "bulky").read_text().split()
    assert told == [word for step in range(1, STEPS + 1) for word in ("step", str(step))] + [
        "finish",
        "finished",
    ], told


def read_tensorboard(disk: Disk, run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(disk.path / run.name), size_guidance={"scalars": 0})
    seen.Reload()
    losses = {line["step"]: line["loss"] for line in RunFolder.open(run).read_metrics()}
    found = [(each.step, each.value) for each in seen.Scalars("train/loss")]
    assert [step for step, _ in found] == list(losses), found
    assert all(abs(value - losses[step]) <= 1e-6 * abs(losses[step]) for step, value in found)


def read_mlflow(uri: str) -> None:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    steps = [each.step for each in client.get_metric_history(found.info.run_id, "loss")]
    assert steps == list(range(1, STEPS + 1)) and found.info.status == "FINISHED", (
        steps,
        found.info.status,
    )


READ: dict[str, Callable[[Disk, Path], None]] = {
    "Bulky": read_bulky,
    "tensorboard": read_tensorboard,
}

if __name__ == "__main__":
    main()
