"""When a worker is started again and when the run gives up, told as plain values under a clock moved by hand."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.scheduler.recovery import Patience, Recovery, Restart

WORKERS = ("a", "b", "c")


def delays(recovery: Recovery, times: int, alive_s: float = 0.0) -> list[float]:
    """How long a worker waits before each restart, that lives for so long each time."""
    found, now = [], 0.0
    for made in range(times):
        recovery.died("a", "died", now)
        assert recovery.hopeless is None
        died, quarter = now, 0.0625
        while not recovery.due(now):
            now += quarter
        found.append(now - died)
        recovery.recovered("a", now)
        recovery.progressed(made + 1, now)
        now += alive_s + quarter
    return found


def test_each_restart_of_a_worker_waits_twice_as_long_as_the_one_before_it_up_to_a_limit() -> None:
    recovery = Recovery(Patience(first_s=0.25, most_s=4.0, quiet_s=1_000.0))
    assert delays(recovery, 7) == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_worker_that_was_quiet_for_a_while_begins_again_with_the_shortest_wait() -> None:
    recovery = Recovery(Patience(first_s=0.25, quiet_s=10.0))
    assert delays(recovery, 4, alive_s=10.0) == [0.25] * 4


def test_a_worker_with_which_the_run_made_progress_begins_again_with_the_shortest_wait() -> None:
    recovery = Recovery(Patience(first_s=1.0, quiet_s=1_000.0))
    for attempt, (died, progress) in enumerate([(0.0, 1), (10.0, 2), (20.0, 2), (30.0, 3)]):
        recovery.died("a", "died", died)
        waits_s = 2.0 if attempt == 3 else 1.0
        assert not recovery.due(died + waits_s - 0.1) and recovery.due(died + waits_s)
        recovery.recovered("a", died + waits_s)
        recovery.progressed(progress, died + 5.0)


def test_a_worker_that_is_not_at_work_again_has_not_been_quiet() -> None:
    recovery = Recovery(Patience(first_s=1.0, quiet_s=10.0))
    recovery.died("a", "died", 0.0)
    assert recovery.due(1.0) == [Restart("a", 1)]
    recovery.died("a", "was not ready", 100.0)
    assert recovery.due(101.5) == [] and recovery.due(102.0) == [Restart("a", 2)]


def test_a_worker_that_fails_again_and_again_is_hopeless_with_every_cause_named() -> None:
    recovery = Recovery(Patience(of_one=3))
    for number, cause in enumerate(("died (SIGKILL)", "failed: no memory", "died (SIGKILL)")):
        assert recovery.hopeless is None
        recovery.died("a", cause, 100.0 * number)
        recovery.due(100.0 * number + 50)
    assert recovery.hopeless is not None
    for said in ("'a' failed 3 times in 200 s", "'a' died (SIGKILL) (2 times)", "'a' failed: no memory", "logs/a.log"):
        assert said in recovery.hopeless


def test_progress_in_between_gives_new_hope_and_progress_made_again_does_not() -> None:
    hopes = []
    for steps in ((1, 2, 3, 4), (1, 1, 1, 1)):
        recovery = Recovery(Patience(of_one=2))
        for number, step in enumerate(steps):
            recovery.died("a", "died", 10.0 * number)
            recovery.due(10.0 * number + 5)
            recovery.progressed(step, 10.0 * number + 6)
        hopes.append(recovery.hopeless is None)
    assert hopes == [True, False]


def test_failures_of_long_ago_count_no_more() -> None:
    recovery = Recovery(Patience(of_one=2, of_one_s=100.0))
    for number in range(5):
        recovery.died("a", "died", 101.0 * number)
        recovery.due(101.0 * number + 50)
    assert recovery.hopeless is None


def test_too_many_failures_of_all_workers_end_the_run_though_it_makes_progress() -> None:
    recovery = Recovery(Patience(of_one=2, of_all=6, of_all_s=100.0))
    for number in range(6):
        assert recovery.hopeless is None
        recovery.died(WORKERS[number % 3], "died", float(number))
        recovery.due(number + 0.5)
        recovery.progressed(number + 1, number + 0.6)
    assert recovery.hopeless is not None and all(f"'{name}' died (2 times)" in recovery.hopeless for name in WORKERS)


@pytest.mark.parametrize("how", ["the run ends", "there is no hope"])
def test_nothing_is_started_again_when(how: str) -> None:
    recovery = Recovery(Patience(of_one=1 if how == "there is no hope" else 9))
    if how == "the run ends":
        recovery.end()
    recovery.died("a", "died", 0.0)
    assert recovery.due(1e9) == []


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("die", "due", "recover", "progress", "end")), st.sampled_from(WORKERS),
        st.floats(0.0, 40.0, allow_nan=False), st.integers(0, 5),
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=150)
@given(STEPS)
def test_whatever_happens_a_death_has_one_restart_at_most_after_its_wait_and_none_after_the_end(
    steps: list[tuple[Any, ...]],
) -> None:
    patience = Patience(first_s=0.5, most_s=8.0, of_one=4, of_all=12, of_all_s=200.0)
    recovery = Recovery(patience)
    now, over, made = 0.0, False, 0
    died: dict[str, float] = {}
    attempts = dict.fromkeys(WORKERS, 0)
    for kind, worker, seconds, more in steps:
        now += seconds
        if kind == "die":
            recovery.died(worker, "died", now)
            died.setdefault(worker, now)
        elif kind == "recover":
            recovery.recovered(worker, now)
        elif kind == "progress":
            made += more
            recovery.progressed(made, now)
        elif kind == "end" and more == 0:
            over = True
            recovery.end()
        elif kind == "due":
            found = recovery.due(now)
            assert not (found and (over or recovery.hopeless))
            for restart in found:
                waited = now - died.pop(restart.worker)
                assert waited >= patience.first_s
                attempts[restart.worker] += 1
                assert restart.attempt == attempts[restart.worker] == recovery.attempt(restart.worker)
            if not (over or recovery.hopeless):
                assert not [name for name, at in died.items() if now - at > patience.most_s]
            assert recovery.due(now) == []
        assert all(recovery.down(name) == (name in died) for name in WORKERS)


@settings(max_examples=100)
@given(st.lists(st.floats(0.0, 100.0, allow_nan=False), min_size=5, max_size=5))
def test_a_worker_that_only_dies_ends_the_run_at_the_set_number_whatever_the_times(gaps: list[float]) -> None:
    recovery, now = Recovery(Patience(of_one=5)), 0.0
    for number, gap in enumerate(gaps):
        assert recovery.hopeless is None
        now += gap
        recovery.died("a", "died", now)
        now += 30.0
        assert recovery.due(now) == ([Restart("a", number + 1)] if number < 4 else [])
        recovery.recovered("a", now)
    assert recovery.hopeless is not None


def test_what_a_restart_does_not_mend_is_hopeless_the_first_time() -> None:
    recovery = Recovery(Patience())
    recovery.died("a", "failed: reward() in mine.py:3 returned nan", 0.0, lasting=True)
    assert recovery.hopeless is not None
    for part in ("'a'", "mine.py:3 returned nan", "a restart would not mend that"):
        assert part in recovery.hopeless
    assert recovery.due(1_000.0) == []
