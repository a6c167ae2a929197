"""A run with a tracker whose scheduler dies, or is stopped: the next one tells the tracker the rest, nothing twice."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from rigs.machine import alive, wait_until
from rigs.programs import Program, program, under_way
from test_scheduler_deaths import ended, faults, further, is_clean

from dataflow.folder.run_folder import RunFolder

__all__ = ["program"]

pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(300), pytest.mark.slow]

LINES = f"{Path(__file__).parents[2] / 'dataflow' / 'trackers' / 'bad_trackers.py'}:Lines"
Start = Callable[..., Program]


def told(each: Program) -> list[str]:
    path = each.runs / "latest" / "lines.txt"
    return path.read_text().splitlines() if path.exists() else []


def steps_told(each: Program) -> list[int]:
    return [int(line.split()[1]) for line in told(each) if line.startswith("trainer ")]


def goes_on(each: Program) -> None:
    """Wait until the tracker is told of steps that were made after now."""
    made = each.steps()
    wait_until(lambda: max(steps_told(each), default=0) > made, 90.0, f"step {made + 1} in the tracker")


def is_told_once(each: Program, steps: int, schedulers: int) -> None:
    """Of every step, with its loss, by one process after the other."""
    lines = RunFolder.open(each.runs / "latest").read_metrics()
    expected = {line["step"]: f"trainer {line['step']} {line['loss']:.3f}" for line in lines if "loss" in line}
    found = [line.removesuffix(" again") for line in told(each) if line.startswith("trainer ")]
    assert len(expected) == steps and Counter(found) == Counter(expected.values())
    starts = [line for line in told(each) if line.startswith("start ")]
    ends = [line for line in told(each) if line.startswith("finish ")]
    assert starts[0] == "start new 0" and len(starts) == schedulers, starts
    assert all(line.startswith("start again ") for line in starts[1:])
    assert ends[-1] == "finish finished" and set(ends[:-1]) <= {"finish died"}


def test_a_standby_tells_the_tracker_the_rest_as_often_as_a_scheduler_dies(program: Start) -> None:
    first = program("learning", steps=60, standby=True, track=[LINES])
    under_way(first)
    goes_on(first)
    family = first.family()
    first.kill()
    for count in (1, 2):
        wait_until(lambda: faults(first) == ["scheduler"] * count, 60.0, f"the scheduler after {count} deaths")  # noqa: B023
        goes_on(first)
        if count == 1:
            os.kill(int((first.runs / "latest" / "lock").read_text().split()[0]), signal.SIGKILL)
    wait_until(lambda: first.outcome() == "finished", 180.0, "the end of the run")
    wait_until(lambda: told(first)[-1] == "finish finished", 60.0, "the end of the tracker")
    ended(first, family, 20.0)
    is_clean(first)
    is_told_once(first, 60, schedulers=3)


def test_a_stopped_scheduler_and_its_standby_do_not_both_tell_the_tracker(program: Start) -> None:
    first = program("learning", steps=60, standby=True, track=[LINES], limits={"silent_s": 6.0})
    under_way(first)
    goes_on(first)
    family = first.family() - {first.process.pid}
    os.kill(first.process.pid, signal.SIGSTOP)
    wait_until(lambda: faults(first) == ["scheduler"], 90.0, "the standby")
    further(first)
    os.kill(first.process.pid, signal.SIGCONT)
    first.process.wait(120)
    goes_on(first)
    wait_until(lambda: first.outcome() == "finished", 180.0, "the end of the run")
    wait_until(lambda: told(first)[-1] == "finish finished", 60.0, "the end of the tracker")
    is_clean(first)
    is_told_once(first, 60, schedulers=2)
    wait_until(lambda: not alive(family), 20.0, "the end of all processes")
