"""A slice of work in which nobody computes is told from one that takes long."""

import subprocess
import sys
import threading
import time

import pytest

from dataflow.worker.cpu_watchdog import LOOK_S, CpuWatchdog, processor_time


def looks(used: list[float], every_s: float = LOOK_S) -> list[float]:
    """What is said at each look of one slice, given the processor time at each."""
    left = iter(used)
    asleep = CpuWatchdog(lambda: next(left))
    return [asleep.look((at + 1) * every_s, 100.0 + at * every_s) for at in range(len(used))]


def test_who_computes_nothing_is_asleep_since_the_first_look() -> None:
    assert looks([7.0, 7.0, 7.001, 7.001]) == [0.0, LOOK_S, 2 * LOOK_S, 3 * LOOK_S]


def test_who_computes_is_awake_and_falls_asleep_anew() -> None:
    assert looks([7.0, 7.0, 7.5, 7.5, 7.5]) == [0.0, LOOK_S, 0.0, LOOK_S, 2 * LOOK_S]


def test_short_calls_that_mostly_wait_are_no_sleep() -> None:
    """Five milliseconds of work for each second that a call over a network takes."""
    assert looks([7.0, 7.01, 7.02, 7.03]) == [0.0] * 4


def test_a_process_that_ended_is_a_sign_of_life() -> None:
    assert looks([7.0, 3.0, 3.0]) == [0.0, 0.0, LOOK_S]


def test_a_short_slice_is_not_looked_at_and_each_slice_is_one_of_its_own() -> None:
    looked = []

    def used_s() -> float:
        looked.append(True)
        return 7.0

    asleep = CpuWatchdog(used_s)
    assert asleep.look(LOOK_S / 2, 100.0) == 0.0
    assert not looked
    assert asleep.look(LOOK_S, 101.0) == 0.0
    assert asleep.look(2 * LOOK_S, 101.0 + LOOK_S) == LOOK_S
    assert asleep.look(0.1, 102.0 + LOOK_S) == 0.0
    assert asleep.look(LOOK_S, 102.0 + 2 * LOOK_S) == 0.0


def test_between_two_looks_time_goes_on() -> None:
    asleep = CpuWatchdog(lambda: 7.0)
    assert [asleep.look(LOOK_S + at / 5, 100.0 + at / 5) for at in range(4)] == pytest.approx(
        [0.0, 0.2, 0.4, 0.6]
    )


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_the_main_thread_and_other_processes_count_and_other_threads_do_not() -> None:
    before = processor_time()
    helper = threading.Thread(target=compute, args=(0.3,))
    helper.start()
    helper.join()
    assert processor_time() - before < 0.2
    compute(0.3)
    assert processor_time() - before >= 0.3
    program = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdin is not None
    child.stdout.readline()
    assert processor_time() - before >= 0.75
    child.stdin.close()
    child.stdout.close()
    child.wait(10)
