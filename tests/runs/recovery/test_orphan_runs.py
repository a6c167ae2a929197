"""Runs that are killed with all their processes: the next command removes what they left in
memory.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rigs.machine import alive, wait_until
from rigs.programs import Program, program, under_way

__all__ = ["program"]

pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[3]
Start = Callable[..., Program]


def killed_with_all(program: Start) -> tuple[Program, list[Path]]:
    """A run under way of which no process is left, and the folders that are."""
    running = program("endless", steps=12)
    under_way(running)
    family = running.family()
    # the scheduler first: it would notice the others' ends
    for pid in [running.process.pid, *family]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    running.process.wait(10)
    wait_until(lambda: not alive(family), 10.0, "the end of all processes")
    left = [made for made in running.made() if made.exists()]
    assert left
    return running, left


def stop(each: Program) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "dataflow", "stop", str(each.runs / "latest")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_stop_says_of_a_killed_run_that_it_does_not_run_and_removes_what_it_left(
    program: Start,
) -> None:
    first, left = killed_with_all(program)
    done = stop(first)
    assert done.returncode == 0 and "does not run: it was killed" in done.stdout, done.stderr
    assert not any(made.exists() for made in left)
    again = stop(first)
    assert again.returncode == 2 and "takes no commands: it is over" in again.stderr


@pytest.mark.parametrize("resume", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_the_next_run_removes_what_a_killed_one_left(program: Start, resume: bool) -> None:
    _, left = killed_with_all(program)
    second = program("endless", steps=12, resume=resume)
    wait_until(lambda: not any(made.exists() for made in left), 60.0, "the end of what was left")
    second.process.wait(90)
    assert "ended after 12 steps: clean" in second.output()
