"""When a worker is started again and when the run gives up, told as plain values under a clock
moved by hand.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_table import small_table

from dataflow.limits import Limits, Patience
from dataflow.scheduler import recovery
from dataflow.scheduler.table import ProcessState, WorkerRecord

WORKERS = ("a", "b", "c")


class Recovery:
    """A table of workers that do nothing but fail."""

    def __init__(self, patience: Patience) -> None:
        self.table = small_table(limits=Limits(patience=patience))
        self.table.workers = {
            name: WorkerRecord(
                name=name, worker=name, replica=0, nodes=("node",), process=ProcessState.READY
            )
            for name in WORKERS
        }

    @property
    def hopeless(self) -> str | None:
        return self.table.hopeless

    def died(self, worker: str, cause: str, now: float, *, lasting: bool = False) -> None:
        record = self.table.workers[worker]
        record.lasting = lasting
        recovery.died(self.table, record, cause, now)

    def recovered(self, worker: str, now: float) -> None:
        recovery.recovered(self.table.workers[worker], now)

    def progressed(self, made: int, now: float) -> None:
        recovery.progressed(self.table, made, now)

    def due(self, now: float) -> list[tuple[str, int]]:
        return [(record.name, record.life.attempt) for record in recovery.restart(self.table, now)]

    def end(self) -> None:
        self.table.run.draining = True


def delays(fails: Recovery, times: int, alive_s: float = 0.0) -> list[float]:
    """How long a worker waits before each restart, that lives for so long each time."""
    found, now = [], 0.0
    for made in range(times):
        fails.died("a", "died", now)
        assert fails.hopeless is None
        died, quarter = now, 0.0625
        while not fails.due(now):
            now += quarter
        found.append(now - died)
        fails.recovered("a", now)
        fails.progressed(made + 1, now)
        now += alive_s + quarter
    return found


def test_each_restart_of_a_worker_waits_twice_as_long_as_the_one_before_it_up_to_a_limit() -> None:
    fails = Recovery(Patience(first_s=0.25, most_s=4.0, quiet_s=1_000.0))
    assert delays(fails, 7) == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_worker_that_was_quiet_for_a_while_begins_again_with_the_shortest_wait() -> None:
    fails = Recovery(Patience(first_s=0.25, quiet_s=10.0))
    assert delays(fails, 4, alive_s=10.0) == [0.25] * 4


def test_a_worker_with_which_the_run_made_progress_begins_again_with_the_shortest_wait() -> None:
    fails = Recovery(Patience(first_s=1.0, quiet_s=1_000.0))
    for attempt, (died, progress) in enumerate([(0.0, 1), (10.0, 2), (20.0, 2), (30.0, 3)]):
        fails.died("a", "died", died)
        waits_s = 2.0 if attempt == 3 else 1.0
        assert not fails.due(died + waits_s - 0.1) and fails.due(died + waits_s)
        fails.recovered("a", died + waits_s)
        fails.progressed(progress, died + 5.0)


def test_a_worker_that_is_not_at_work_again_has_not_been_quiet() -> None:
    fails = Recovery(Patience(first_s=1.0, quiet_s=10.0))
    fails.died("a", "died", 0.0)
    assert fails.due(1.0) == [("a", 1)]
    fails.died("a", "was not ready", 100.0)
    assert fails.due(101.5) == [] and fails.due(102.0) == [("a", 2)]


def test_a_worker_that_fails_again_and_again_is_hopeless_with_every_cause_named() -> None:
    fails = Recovery(Patience(of_one=3))
    for number, cause in enumerate(("died (SIGKILL)", "failed: no memory", "died (SIGKILL)")):
        assert fails.hopeless is None
        fails.died("a", cause, 100.0 * number)
        fails.due(100.0 * number + 50)
    assert fails.hopeless is not None
    for said in (
        "'a' failed 3 times in 200 s",
        "'a' died (SIGKILL) (2 times)",
        "'a' failed: no memory",
        "logs/a.log",
    ):
        assert said in fails.hopeless


def test_progress_in_between_gives_new_hope_and_progress_made_again_does_not() -> None:
    hopes = []
    for steps in ((1, 2, 3, 4), (1, 1, 1, 1)):
        fails = Recovery(Patience(of_one=2))
        for number, step in enumerate(steps):
            fails.died("a", "died", 10.0 * number)
            fails.due(10.0 * number + 5)
            fails.progressed(step, 10.0 * number + 6)
        hopes.append(fails.hopeless is None)
    assert hopes == [True, False]


def test_failures_of_long_ago_count_no_more() -> None:
    fails = Recovery(Patience(of_one=2, of_one_s=100.0))
    for number in range(5):
        fails.died("a", "died", 101.0 * number)
        fails.due(101.0 * number + 50)
    assert fails.hopeless is None


def test_too_many_failures_of_all_workers_end_the_run_though_it_makes_progress() -> None:
    fails = Recovery(Patience(of_one=2, of_all=6, of_all_s=100.0))
    for number in range(6):
        assert fails.hopeless is None
        fails.died(WORKERS[number % 3], "died", float(number))
        fails.due(number + 0.5)
        fails.progressed(number + 1, number + 0.6)
    assert fails.hopeless is not None and all(
        f"'{name}' died (2 times)" in fails.hopeless for name in WORKERS
    )


@pytest.mark.parametrize("how", ["the run ends", "there is no hope"])
def test_nothing_is_started_again_when(how: str) -> None:
    fails = Recovery(Patience(of_one=1 if how == "there is no hope" else 9))
    if how == "the run ends":
        fails.end()
    fails.died("a", "died", 0.0)
    assert fails.due(1e9) == []


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("die", "due", "recover", "progress", "end")),
        st.sampled_from(WORKERS),
        st.floats(0.0, 40.0, allow_nan=False),
        st.integers(0, 5),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(STEPS)
def test_whatever_happens_a_death_has_one_restart_at_most_after_its_wait_and_none_after_the_end(
    steps: list[tuple[Any, ...]],
) -> None:
    patience = Patience(first_s=0.5, most_s=8.0, of_one=4, of_all=12, of_all_s=200.0)
    fails = Recovery(patience)
    now, over, made = 0.0, False, 0
    died: dict[str, float] = {}
    attempts = dict.fromkeys(WORKERS, 0)
    for kind, worker, seconds, more in steps:
        now += seconds
        if kind == "die":
            fails.died(worker, "died", now)
            died.setdefault(worker, now)
        elif kind == "recover":
            fails.recovered(worker, now)
        elif kind == "progress":
            made += more
            fails.progressed(made, now)
        elif kind == "end" and more == 0:
            over = True
            fails.end()
        elif kind == "due":
            found = fails.due(now)
            assert not (found and (over or fails.hopeless))
            for name, attempt in found:
                waited = now - died.pop(name)
                assert waited >= patience.first_s
                attempts[name] += 1
                assert attempt == attempts[name]
            if not (over or fails.hopeless):
                assert not [name for name, at in died.items() if now - at > patience.most_s]
            assert fails.due(now) == []
        assert all(
            (fails.table.workers[name].restart_at is not None) == (name in died) for name in WORKERS
        )


@settings(max_examples=100)
@given(st.lists(st.floats(0.0, 100.0, allow_nan=False), min_size=5, max_size=5))
def test_a_worker_that_only_dies_ends_the_run_at_the_set_number_whatever_the_times(
    gaps: list[float],
) -> None:
    fails, now = Recovery(Patience(of_one=5)), 0.0
    for number, gap in enumerate(gaps):
        assert fails.hopeless is None
        now += gap
        fails.died("a", "died", now)
        now += 30.0
        assert fails.due(now) == ([("a", number + 1)] if number < 4 else [])
        fails.recovered("a", now)
    assert fails.hopeless is not None


def test_what_a_restart_does_not_mend_is_told_with_what_the_worker_died_of_before() -> None:
    fails = Recovery(Patience())
    fails.died("b", "died (SIGTERM)", 0.0)
    fails.died("a", "died (SIGKILL)", 0.0)
    fails.due(30.0)
    fails.died("a", "failed: the model is gone", 31.0, lasting=True)
    assert (
        fails.hopeless
        == "worker 'a' failed: the model is gone; a restart would not mend that (before that: 'a'"
        " died (SIGKILL)); see logs/a.log"
    )


def test_what_a_restart_does_not_mend_is_hopeless_the_first_time() -> None:
    fails = Recovery(Patience())
    fails.died("a", "failed: reward() in mine.py:3 returned nan", 0.0, lasting=True)
    assert fails.hopeless is not None
    for part in ("'a'", "mine.py:3 returned nan", "a restart would not mend that"):
        assert part in fails.hopeless
    assert fails.due(1_000.0) == []
