"""A run with a tracker whose scheduler dies or is replaced: the same run goes on there, and each
step is told once.
"""

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rigs.machine import wait_until
from rigs.programs import Program, program, under_way
from test_scheduler_deaths import ended, faults, is_done

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
