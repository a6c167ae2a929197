"""A scheduler that a signal has stopped, or whose terminal nobody reads: the run goes on, with it
or another.
"""

import os
import pty
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rigs.machine import alive, wait_until
from rigs.programs import Program, program, under_way
from test_scheduler_deaths import ended, faults, further, is_clean, is_done
from test_suspended_runs import leaders, press_control_z, stands_still

__all__ = ["program"]


pytestmark = [
    pytest.mark.usefixtures("forked", "one_core"),
    pytest.mark.timeout(240),
    pytest.mark.slow,
]


Start = Callable[..., Program]


def contents(folder: Path) -> dict[str, bytes]:
    """All that the run's folder holds, by name."""
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.resolve().rglob("*"))
        if path.is_file()
    }


def stop(each: Program) -> None:
    os.kill(each.process.pid, signal.SIGSTOP)


def go_on(each: Program) -> None:
    os.kill(each.process.pid, signal.SIGCONT)


def ends_as_replaced(each: Program) -> None:
    go_on(each)
    each.process.wait(60)
    assert each.process.returncode == 1 and "its standby has taken the run over" in each.output(), (
        each.output()
    )


def test_a_stopped_scheduler_is_replaced_by_its_standby_and_touches_nothing_when_it_wakes(
    program: Start,
) -> None:
    first = program("endless", steps=90, standby=True, limits={"silent_s": 6.0})
    under_way(first)
    workers = leaders(first) - {first.process.pid}
    family = first.family()
    stop(first)
    wait_until(lambda: faults(first) == ["scheduler"], 60.0, "the standby")
    further(first)
    assert workers <= set(alive(workers)), "nobody is started again"
    ends_as_replaced(first)
    further(first)
    assert workers <= set(alive(workers)) and faults(first) == ["scheduler"]
    wait_until(lambda: first.outcome() == "finished", 120.0, "the end of the run")
    ended(first, family, 20.0)
    is_done(first, 90)


def test_a_scheduler_that_wakes_when_all_is_over_changes_no_file(program: Start) -> None:
    first = program("endless", steps=50, standby=True, limits={"silent_s": 6.0})
    under_way(first)
    stop(first)
    wait_until(lambda: faults(first) == ["scheduler"], 60.0, "the standby")
    family = first.family()
    wait_until(lambda: first.outcome() == "finished", 120.0, "the end of the run")
    ended(first, family - {first.process.pid}, 20.0)
    before = contents(first.runs / "latest")
    ends_as_replaced(first)
    assert contents(first.runs / "latest") == before
    is_done(first, 50)


def test_a_run_that_is_stopped_by_control_z_has_no_standby_that_goes_on(program: Start) -> None:
    first = program(
        "endless", steps=40, standby=True, adopt_s=2.0, limits={"silent_s": 3.0, "hang_s": 4.0}
    )
    under_way(first)
    workers = press_control_z(first)
    made = first.steps()
    time.sleep(6.0)
    assert stands_still(first, workers) and first.steps() == made and faults(first) == []
    os.killpg(first.process.pid, signal.SIGCONT)
    first.process.wait(120)
    assert first.process.returncode == 0, first.output()
    is_done(first, 40)
    assert faults(first) == []


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("endless", 60),
        pytest.param("learning", 10, id="when all steps are made"),
        ("learning", 200),
    ],
)
def test_workers_that_were_left_alone_too_long_go_on_when_the_scheduler_does(
    program: Start, kind: str, steps: int
) -> None:
    """They had lost patience: trainers have ended, and wrote checkpoints, others have stayed."""
    first = program(kind, steps=steps, adopt_s=0.0)  # a link's patience is 5 s at least
    under_way(first)
    stop(first)
    log = first.runs / "latest" / "logs" / "trainer-0.log"
    wait_until(lambda: "coming to an end" in log.read_text(), 60.0, "the end of patience")
    time.sleep(3.0)
    go_on(first)
    first.process.wait(180)
    assert first.process.returncode == 0, first.output()
    is_clean(first)
    assert first.steps() == steps and first.outcome() == "finished"


def test_a_terminal_that_nobody_reads_changes_nothing_for_the_run(
    program: Start, tmp_path: Path
) -> None:
    """Its workers would have lost patience within 5 s."""
    reads, writes = pty.openpty()
    running = program("endless", steps=60, adopt_s=0.0, quiet=False, output=writes)
    side = os.open(os.ttyname(writes), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        os.set_blocking(reads, False)
        while True:
            os.write(side, b"x" * 512)
    except BlockingIOError:
        pass
    running.process.wait(120)
    assert running.process.returncode == 0
    is_done(running, 60)
    assert faults(running) == []
    for each in (reads, writes, side):
        os.close(each)


def test_no_successor_comes_too_late(program: Start) -> None:
    """At the end of the workers' patience, and after it."""
    first = program("endless", steps=60, adopt_s=5.0)
    under_way(first)
    family = first.family()
    first.kill()
    time.sleep(4.8)
    second = program("endless", steps=60, adopt_s=5.0, resume=True)
    second.process.wait(180)
    assert second.process.returncode == 0, second.output()
    is_done(second, 60)
    ended(second, family, 20.0)
