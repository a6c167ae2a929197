"""The scheduler may die: its workers go on, another takes them over; where none comes they end in
order, and nothing is left of them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rigs.machine import alive, wait_until
from rigs.programs import Program, program, under_way

from dataflow import verify
from dataflow.errors import RunError
from dataflow.folder.faults import FILE
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.scheduler.requests import ask_to_stop

__all__ = ["program"]

pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(180)]

STEPS = 24
ROOT = Path(__file__).parents[3]
Start = Callable[..., Program]


def faults(each: Program) -> list[str]:
    path = each.runs / "latest" / FILE
    return (
        [json.loads(line)["worker"] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


def is_clean(each: Program) -> None:
    verdict = verify((each.runs / "latest").resolve())
    assert verdict.clean, verdict.line


def is_done(each: Program, steps: int = STEPS) -> None:
    is_clean(each)
    assert each.steps() == steps and each.outcome() == "finished"
    with contextlib.closing(Ledger.open(RunFolder.open(each.runs / "latest").ledger)) as ledger:
        assert ledger.counts("trainer").trained == steps * 32


def further(each: Program, steps: int = 3) -> None:
    """Wait until so many steps more are made."""
    before = each.steps()
    wait_until(lambda: each.steps() >= before + steps, 60.0, f"{steps} steps more")


def workers_of(family: set[int], scheduler: int) -> set[int]:
    """Its forkserver and what that forked."""
    return set(alive(family - {scheduler}))


def ended(each: Program, family: set[int], within_s: float) -> None:
    wait_until(lambda: not alive(family), within_s, "the end of all processes")
    wait_until(
        lambda: not any(made.exists() for made in each.made()), 5.0, "the end of its sockets"
    )


def test_workers_go_on_without_a_scheduler_and_the_next_one_takes_them_over_as_they_are(
    program: Start,
) -> None:
    first = program("endless", steps=STEPS)
    under_way(first)
    family = first.family()
    first.kill()
    workers = workers_of(family, first.process.pid)
    with pytest.raises(
        RunError, match="the scheduler of '.*' has died; dataflow resume takes over"
    ):
        ask_to_stop(RunFolder.open(first.runs / "latest"))
    further(first)
    assert workers_of(family, first.process.pid) == workers and len(workers) >= 1 + 4 + 1 + 2
    second = program("endless", steps=STEPS, resume=True)
    wait_until(lambda: faults(second) == ["scheduler"], 60.0, "the second scheduler")
    assert set(alive(workers)) == workers
    second.process.wait(90)
    assert f"ended after {STEPS} steps: clean" in second.output()
    is_done(second)
    assert faults(second) == ["scheduler"]
    ended(second, workers, 5.0)


def test_a_standby_takes_over_by_itself_as_often_as_a_scheduler_dies(program: Start) -> None:
    first = program("endless", steps=STEPS, standby=True)
    under_way(first)
    family = first.family()
    first.kill()
    log = first.runs / "latest" / "logs" / "scheduler.log"
    for count in (1, 2):
        wait_until(
            lambda count=count: faults(first) == ["scheduler"] * count,
            60.0,
            f"the scheduler after {count} deaths",
        )
        further(first)
        if count == 1:
            os.kill(int((first.runs / "latest" / "lock").read_text().split()[0]), signal.SIGKILL)
    wait_until(lambda: first.outcome() == "finished", 90.0, "the end of the run")
    ended(first, family, 10.0)
    is_done(first)
    assert log.exists()


@pytest.mark.slow
def test_a_run_whose_program_is_gone_ends_in_order_when_it_is_told_to(program: Start) -> None:
    first = program("endless", standby=True)
    under_way(first)
    family = first.family()
    first.kill()
    wait_until(lambda: faults(first) == ["scheduler"], 60.0, "the standby")
    command = [sys.executable, "-m", "dataflow", "stop", str(first.runs / "latest")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "ends after the step under way" in done.stdout, done.stderr
    wait_until(lambda: first.outcome() == "stopped", 60.0, "the end of the run")
    ended(first, family, 10.0)
    is_clean(first)
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2 and "takes no commands: it is over" in again.stderr


@pytest.mark.slow
def test_a_worker_that_dies_while_there_is_no_scheduler_is_started_by_the_next_one(
    program: Start,
) -> None:
    first = program("endless", steps=STEPS)
    under_way(first)
    family = first.family()
    first.kill()
    latest = first.runs / "latest"
    pid = next(
        int(line.partition("pid=")[2].split()[0])
        for line in (latest / "logs" / "generator-0.log").read_text().splitlines()
        if "pid=" in line
    )
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive([pid]), 5.0, "the generator's end")
    second = program("endless", steps=STEPS, resume=True)
    second.process.wait(90)
    is_done(second)
    assert sorted(faults(second)) == ["generator-0", "scheduler"]
    ended(second, family, 5.0)


@pytest.mark.slow
def test_a_run_that_is_to_go_on_otherwise_is_not_taken_over_but_resumed(program: Start) -> None:
    first = program("endless", steps=STEPS)
    under_way(first)
    family = first.family()
    first.kill()
    second = program("endless", steps=STEPS + 5, resume=True)
    second.process.wait(90)
    is_done(second, STEPS + 5)
    assert faults(second) == []
    ended(second, family, 5.0)


@pytest.mark.slow
def test_no_process_outlives_a_killed_scheduler_in_whose_place_none_comes(program: Start) -> None:
    running = program("endless", adopt_s=1.0)
    under_way(running)
    family = running.family()
    # itself, forkserver, workers, the scorer's server and processes
    assert len(family) >= 1 + 1 + 4 + 1 + 2
    assert all(made.is_dir() for made in running.made()) and running.made()
    running.kill()
    assert len(alive(family)) == len(family) - 1
    ended(running, family, 30.0)
    is_clean(running)


@pytest.mark.slow
def test_workers_whose_scheduler_dies_before_they_began_end_with_it(program: Start) -> None:
    running = program("late", standby=True)
    wait_until((running.folder / "building").exists, 60.0, "the generator's start")
    family = running.family()
    running.kill()
    ended(running, family, 5.0)


@pytest.mark.slow
def test_workers_that_would_wait_for_nobody_are_patient_with_a_scheduler_that_lives(
    program: Start,
) -> None:
    running = program("endless", adopt_s=0.0, steps=6)
    running.process.wait(90)
    is_done(running, 6)
    assert faults(running) == []


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
def test_a_trainer_that_is_left_alone_ends_its_step_writes_a_checkpoint_and_the_run_goes_on_later(
    program: Start,
) -> None:
    first = program("learning", adopt_s=2.0, steps=100_000)
    under_way(first)
    family = first.family()
    first.kill()
    ended(first, family, 60.0)
    is_clean(first)
    folder = RunFolder.open((first.runs / "latest").resolve())
    made = first.steps()
    assert folder.latest_checkpoint() is not None and str(made) in folder.latest_checkpoint().name  # type: ignore[union-attr]
    second = program("learning", steps=made + 3, resume=True)
    second.process.wait(120)
    assert second.process.returncode == 0, second.output()
    is_clean(second)
    assert second.steps() == made + 3
