"""Ctrl-Z stops a run, all of it, for as long as the user likes; fg, or SIGCONT, lets it go on where
it was.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest
from rigs.machine import alive, wait_until
from rigs.programs import Program, program, under_way

from dataflow import verify
from dataflow.folder.faults import FILE

__all__ = ["program"]


pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(120)]


IMPATIENT = {"hang_s": 2.0, "stuck_s": 2.0, "asleep_s": 2.0, "stall_s": 4.0, "slice_s": 4.0}


"""Seconds; a pause that anybody counted would be longer."""


PAUSE_S = 6.0


Start = Callable[..., Program]


def states(pids: set[int]) -> dict[int, str]:
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[pid] = psutil.Process(pid).status()
    return found


def leaders(each: Program) -> set[int]:
    """The workers: each has a group of its own, and the forkserver, which is in the scheduler's, as
    its parent.
    """
    family = each.family()
    return {
        pid
        for pid in family
        if os.getpgid(pid) == pid
        and psutil.Process(pid).ppid() in family
        and pid != each.process.pid
        and os.getpgid(psutil.Process(pid).ppid()) == each.process.pid
    }


def stands_still(each: Program, workers: set[int]) -> bool:
    found = states({each.process.pid, *workers})
    return set(found.values()) == {psutil.STATUS_STOPPED}


def press_control_z(each: Program) -> set[int]:
    """What a terminal does: everyone in the group gets it. The workers, which stand still now."""
    workers = leaders(each)
    assert len(workers) >= 4
    os.killpg(each.process.pid, signal.SIGTSTP)
    wait_until(lambda: stands_still(each, workers), 10.0, "the pause")
    return workers


def fg(each: Program) -> None:
    os.killpg(each.process.pid, signal.SIGCONT)


def kill_cont(each: Program) -> None:
    os.kill(each.process.pid, signal.SIGCONT)


def goes_on(each: Program, workers: set[int]) -> None:
    """As it was: nobody is started again, and nobody is told of."""
    before = each.steps()
    wait_until(lambda: each.steps() >= before + 3, 30.0, "3 steps more")
    assert leaders(each) == workers
    assert not (each.runs / "latest" / FILE).exists()


@pytest.mark.parametrize("go_on", [fg, pytest.param(kill_cont, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_run_that_is_stopped_by_control_z_goes_on_where_it_was_with_the_same_workers(
    program: Start, go_on: Callable[[Program], None]
) -> None:
    running = program("endless", steps=40, adopt_s=2.0, limits=IMPATIENT)
    under_way(running)
    workers = press_control_z(running)
    made = running.steps()
    time.sleep(PAUSE_S)
    assert stands_still(running, workers) and running.steps() == made
    go_on(running)
    goes_on(running, workers)
    assert press_control_z(running) == workers
    go_on(running)
    running.process.wait(90)
    assert "ended after 40 steps: clean" in running.output()
    verdict = verify((running.runs / "latest").resolve())
    assert verdict.clean, verdict.line


def test_a_stopped_run_ends_with_control_c_and_fg(program: Start) -> None:
    running = program("endless", limits=IMPATIENT)
    under_way(running)
    press_control_z(running)
    running.press_control_c()
    fg(running)
    running.process.wait(30)
    assert running.outcome() == "stopped"


@pytest.mark.slow
def test_a_stopped_run_whose_scheduler_is_killed_goes_on_without_it(program: Start) -> None:
    running = program("endless", adopt_s=30.0)
    under_way(running)
    workers, family = press_control_z(running), running.family()
    running.kill()
    made = running.steps()
    wait_until(lambda: running.steps() > made, 20.0, "a step without a scheduler")
    assert set(alive(workers)) == workers
    second = program("endless", steps=made + 6, resume=True)
    second.process.wait(90)
    wait_until(lambda: not alive(family), 10.0, "the end of all processes")


@pytest.mark.slow
def test_a_stopped_run_of_which_all_is_killed_leaves_no_process(program: Start) -> None:
    running = program("endless")
    under_way(running)
    family = running.family()
    press_control_z(running)
    os.killpg(running.process.pid, signal.SIGKILL)
    wait_until(lambda: not alive(family), 10.0, "the end of all processes")


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
def test_trainer_and_generator_that_stood_still_together_go_on_with_each_other(
    program: Start,
) -> None:
    running = program("learning", steps=60, adopt_s=2.0, limits={"hang_s": 5.0})
    under_way(running)
    workers = press_control_z(running)
    made = running.steps()
    time.sleep(30.0)
    assert running.steps() == made
    fg(running)
    goes_on(running, workers)
    running.process.wait(100)
    assert "ended after 60 steps: clean" in running.output()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_of_several_ranks_goes_on_after_stops_that_are_longer_than_any_of_their_deadlines(
    program: Start,
) -> None:
    """The ranks wait for each other most of the time, so a stop falls into a collective or into a
    transfer.
    """
    running = program(
        "ranks", adopt_s=2.0, limits={"exchange_s": 8.0, "transfer_s": 8.0, "hang_s": 10.0}
    )
    wait_until(lambda: running.steps() >= 2, 200.0, "step 2")
    workers = press_control_z(running)
    for stop in range(3):
        assert stop == 0 or press_control_z(running) == workers
        made = running.steps()
        time.sleep(16.0)
        assert running.steps() == made
        fg(running)
        wait_until(lambda before=made: running.steps() >= before + 2, 90.0, "2 steps more")
        assert leaders(running) == workers
        assert not (running.runs / "latest" / FILE).exists()
        time.sleep(0.37)  # so that the next stop falls into another place of a step
    running.press_control_c()
    running.process.wait(90)
    verdict = verify((running.runs / "latest").resolve())
    assert verdict.clean, verdict.line
