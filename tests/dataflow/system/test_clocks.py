"""Clocks of a run that is stopped now and then."""

import time
from concurrent.futures import ThreadPoolExecutor

from dataflow.system.clocks import ABSENT_S, LOOK_S, AwakeClock, Countdown, RunClock


class Machine:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_awake_clock_goes_with_the_machine_s_and_stands_still_while_nobody_could_look() -> None:
    machine = Machine()
    clock = AwakeClock(machine)
    began = clock()
    for _ in range(10):
        machine.now += ABSENT_S / 2
        clock()
    assert clock() - began == 5 * ABSENT_S
    for away_s in (60.0, 86_400.0):
        machine.now += away_s
        assert clock() - began == 5 * ABSENT_S
    machine.now += 0.5
    assert clock() - began == 5 * ABSENT_S + 0.5


def test_an_awake_clock_takes_an_absence_out_once_whoever_looks() -> None:
    machine = Machine()
    clock = AwakeClock(machine)
    began = clock()
    machine.now += 60.0
    with ThreadPoolExecutor(8) as threads:
        assert {found - began for found in threads.map(lambda _: clock(), range(200))} == {0.0}


def test_a_run_s_clock_does_not_count_what_its_owner_took_out() -> None:
    clock = RunClock(1000.0)
    before = clock()
    clock.stand_still(lambda: time.sleep(0.2))
    assert 0.0 <= clock() - before < 0.2 <= clock.away_s - 1000.0


def test_a_countdown_counts_only_the_seconds_in_which_its_owner_could_wait() -> None:
    machine = Machine()
    wait = Countdown(3 * LOOK_S, AwakeClock(machine))
    assert (wait.slice_s, wait.is_over) == (LOOK_S, False)
    for away_s in (60.0, 86_400.0):
        machine.now += away_s
        assert not wait.is_over
    machine.now += 2.5 * LOOK_S
    assert wait.slice_s < LOOK_S and not wait.is_over
    machine.now += 0.6 * LOOK_S
    assert (wait.slice_s, wait.is_over) == (0.0, True)
