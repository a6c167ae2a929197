"""A run with a tracker whose scheduler dies or is replaced: the same run goes on there, and each
step is told once.
"""

import contextlib
import importlib.util
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rigs.machine import alive, wait_until
from rigs.programs import Program, program, under_way
from test_scheduler_deaths import ended, faults, is_done
from wandb_files import history, wandb_records

from dataflow.folder.run_folder import RunFolder

__all__ = ["program"]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("forked", "one_core"),
    pytest.mark.timeout(600),
]


STEPS = 250


"""Of a tenth of a second: so many that a scheduler dies in their midst, on any machine."""


TRACKERS = Path(__file__).parents[2] / "dataflow" / "trackers" / "bad_trackers.py"


OWN: Mapping[str, Any] = {"steps": STEPS, "track": [f"{TRACKERS}:Steps"]}


Start = Callable[..., Program]


def place(each: Program) -> Path:
    return (each.runs / "latest").resolve()


def told(each: Program) -> list[str]:
    path = place(each) / "steps.txt"
    return path.read_text().splitlines() if path.exists() else []


def trackers_of(each: Program) -> Counter[str]:
    """How many processes tell the run's tracker, or wait to: by the file that they have open."""
    tells = str(place(each) / "trackers" / "Steps.lock")
    processes: Counter[str] = Counter()
    for process in Path("/proc").glob("[0-9]*"):
        files = set()
        with contextlib.suppress(OSError):
            for file in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # that it has closed meanwhile
                    files.add(str(file.readlink()))
        processes.update({"tells": tells in files})
    return processes


def is_told_once(each: Program, *ends: str) -> None:
    """Every step once and in order, by one process after the other, of which each ended the run
    there.
    """
    lines = told(each)
    assert [line for line in lines if line.startswith("step ")] == [
        f"step {step}" for step in range(1, STEPS + 1)
    ]
    rest = [line for line in lines if not line.startswith("step ")]
    starts = ["start new", *["start again"] * (len(ends) - 1)]
    assert rest == [
        line
        for pair in zip(starts, (f"finish {end}" for end in ends), strict=True)
        for line in pair
    ]


def tells(each: Program) -> None:
    wait_until(
        lambda: any(line.startswith("step") for line in told(each)),
        60.0,
        "that the tracker is told a step",
    )


def told_by_the_next(each: Program) -> None:
    """A second process tells, and no other is left."""
    wait_until(lambda: "start again" in told(each), 90.0, "that another process tells the tracker")
    wait_until(lambda: max(trackers_of(each).values()) <= 1, 30.0, "that no other is left")


def nobody_is_left(each: Program, family: set[int]) -> None:
    ended(each, family, 20.0)
    wait_until(lambda: not +trackers_of(each), 20.0, "the end of all that tell trackers")


def test_a_standby_goes_on_with_the_tracker_of_a_scheduler_that_was_killed(program: Start) -> None:
    first = program("endless", standby=True, **OWN)
    under_way(first)
    tells(first)
    assert trackers_of(first) == {"tells": 1}
    family = first.family()
    first.kill()
    wait_until(lambda: faults(first) == ["scheduler"], 60.0, "the standby")
    told_by_the_next(first)
    wait_until(lambda: first.outcome() == "finished", 300.0, "the end of the run")
    nobody_is_left(first, family)
    is_done(first, STEPS)
    is_told_once(first, "died", "finished")


def test_a_resume_goes_on_with_the_tracker_of_a_scheduler_that_was_killed(program: Start) -> None:
    first = program("endless", **OWN)
    under_way(first)
    tells(first)
    family = first.family()
    first.kill()
    second = program("endless", resume=True, **OWN)
    told_by_the_next(second)
    second.process.wait(300)
    assert f"ended after {STEPS} steps: clean" in second.output()
    nobody_is_left(second, family)
    is_done(second, STEPS)
    is_told_once(second, "died", "finished")


def test_a_tracker_is_told_by_the_standby_of_a_scheduler_that_was_stopped(program: Start) -> None:
    """That one lives on, and so does its tracker: until this finds that the run has another."""
    first = program("endless", standby=True, limits={"silent_s": 6.0}, **OWN)
    under_way(first)
    tells(first)
    family = first.family()
    os.kill(first.process.pid, signal.SIGSTOP)
    wait_until(lambda: faults(first) == ["scheduler"], 60.0, "the standby")
    told_by_the_next(first)
    wait_until(lambda: first.outcome() == "finished", 300.0, "the end of the run")
    wait_until(
        lambda: not alive(family - {first.process.pid}),
        20.0,
        "the end of all but the one that is stopped",
    )
    is_told_once(first, "died", "finished")
    os.kill(first.process.pid, signal.SIGCONT)
    first.process.wait(60)
    nobody_is_left(first, family)
    is_done(first, STEPS)
    is_told_once(first, "died", "finished")


def test_no_standby_takes_a_run_over_that_waits_for_a_tracker_at_its_end(program: Start) -> None:
    """All is done by then but that; what a tracker does is no matter of the run, its exit status
    neither.
    """
    first = program(
        "endless",
        standby=True,
        steps=6,
        track=[f"{TRACKERS}:Endless"],
        limits={"silent_s": 6.0, "track_s": 15.0},
    )
    first.process.wait(180)
    assert first.process.returncode == 0 and "ended after 6 steps: clean" in first.output(), (
        first.output()
    )
    assert faults(first) == []
    is_done(first, 6)


def test_a_tracker_whose_processes_all_die_with_the_run_is_told_no_step_less(
    program: Start,
) -> None:
    """As where a container is killed; what was told and not kept is told again, nothing else is."""
    first = program("endless", **OWN)
    under_way(first)
    tells(first)
    family = first.family()
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    first.process.wait(10)
    second = program("endless", resume=True, **OWN)
    second.process.wait(300)
    nobody_is_left(second, family)
    steps = [line for line in told(second) if line.startswith("step ")]
    assert sorted({int(line.split()[1]) for line in steps}) == list(range(1, STEPS + 1))
    assert steps[-1] == f"step {STEPS}" and told(second)[-1] == "finish finished"


@pytest.mark.parametrize(
    "library",
    [
        pytest.param(
            each,
            marks=pytest.mark.skipif(
                importlib.util.find_spec(each) is None,
                reason=f"{each} is not installed: pip install 'dataflow-rl[{each}]'",
            ),
        )
        for each in ("wandb", "tensorboard", "trackio", "mlflow")
    ],
)
@pytest.mark.filterwarnings("ignore")  # of MLflow's own libraries
@pytest.mark.parametrize("how", ["standby", "resume"])
def test_a_library_goes_on_with_the_same_run(
    how: str, library: str, program: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    knobs = {"steps": STEPS, "track": [library]}
    first = program("endless", standby=how == "standby", **knobs)
    under_way(first)
    kept = place(first) / "trackers" / f"{library}.json"
    wait_until(
        lambda: (
            kept.exists()
            and RunFolder.open(place(first)).read_json(f"trackers/{library}.json")["read"] > 0
        ),
        90.0,
        "that the library is told a step",
    )
    family = first.family()
    first.kill()
    last = first if how == "standby" else program("endless", resume=True, **knobs)
    wait_until(lambda: last.outcome() == "finished", 300.0, "the end of the run")
    ended(last, family, 60.0)
    is_done(last, STEPS)
    assert TOLD[library](place(last)) == list(range(1, STEPS + 1))


def steps_of_wandb(run: Path) -> list[int]:
    """Of all its parts, which are of one run there."""
    parts = wandb_records(run)
    kinds = [
        record.run.run_id
        for part in parts
        for record in part
        if record.WhichOneof("record_type") == "run"
    ]
    assert len(parts) >= 2 and len(set(kinds)) == 1, kinds
    return [row["step"] for part in parts for row in history(part) if "lr" in row]


def steps_of_tensorboard(run: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    seen.Reload()
    return [each.step for each in seen.Scalars("train/lr")]


def steps_of_trackio(run: Path) -> list[int]:
    """Of its database, which stands where the environment says."""
    from trackio.sqlite_storage import SQLiteStorage

    (place,) = Path(os.environ["TRACKIO_DIR"]).glob("*.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trackio.sqlite_storage.TRACKIO_DIR", place.parent)
        return [row["step"] for row in SQLiteStorage.get_logs(place.stem, run.name) if "lr" in row]


def steps_of_mlflow(run: Path) -> list[int]:
    """Of the only run of the only experiment beside its own."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.parent}/mlflow.db")
    experiments = [each.experiment_id for each in client.search_experiments()]
    (found,) = client.search_runs(experiments)
    assert found.info.status == "FINISHED", found.info.status
    return [each.step for each in client.get_metric_history(found.info.run_id, "lr")]


TOLD: Mapping[str, Callable[[Path], list[int]]] = {
    "wandb": steps_of_wandb,
    "tensorboard": steps_of_tensorboard,
    "trackio": steps_of_trackio,
    "mlflow": steps_of_mlflow,
}
