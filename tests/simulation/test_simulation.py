"""Whole runs under a virtual clock and a seeded network, with crashes at every touch of the
outside: all laws hold.
"""

import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataflow.folder.finished import Finished
from dataflow.rules import Admission, ReorderBuffer
from dataflow.runtime import Batch
from dataflow.scheduler import recovery, state_machine
from dataflow.worker.acknowledgements import Acknowledgements
from operators.prompts import PromptRuntime

from . import trainer, weights
from .probe import Probe
from .running import hold, notice
from .world import World

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_all_laws_hold_in_each_of_the_first_40_seeds(first: int) -> None:
    hold(World, range(first, first + 20))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, 20_000, 500))
def test_all_laws_hold_in_each_of_20_000_seeds(first: int) -> None:
    hold(World, range(first, first + 500))


@pytest.mark.slow
def test_a_seed_repeats_event_by_event_in_another_process() -> None:
    def log(hashing: str) -> str:
        command = [sys.executable, "-m", "tests.simulation", "--seed", "11"]
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
            env={"PYTHONHASHSEED": hashing, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        return done.stdout

    first = log("1")
    assert "ends as attempt" in first
    assert first == log("2")


def acknowledgements_do_not_wait_for_the_next_node(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Acknowledgements, "sent", lambda *_: None)
    patch.setattr(Acknowledgements, "acknowledged", lambda *_: None)


def the_trainer_acknowledges_on_arrival(patch: pytest.MonkeyPatch) -> None:
    def add_and_ack(self: ReorderBuffer, batch: Batch) -> int:
        batch.ack()
        return add(self, Batch(batch.source, batch.records, batch.origin))

    add = ReorderBuffer.add
    patch.setattr(ReorderBuffer, "add", add_and_ack)


def a_restarted_source_forgets_what_was_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PromptRuntime, "_in_flight", lambda self: deque())


def what_was_finished_is_not_found_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Finished, "find", lambda *_: None)


def a_group_that_comes_twice_is_done_twice(patch: pytest.MonkeyPatch) -> None:
    def always_new(
        self: Acknowledgements, source: str, origin: str, groups: Any, ack: Any
    ) -> list[int]:
        numbers = list(groups)
        arrive(self, source, origin, numbers, ack)
        return numbers

    arrive = Acknowledgements.arrive
    patch.setattr(Acknowledgements, "arrive", always_new)


def admission_knows_no_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admission, "may_start", lambda *_: True)


def nothing_is_swept_and_admission_knows_no_bound(patch: pytest.MonkeyPatch) -> None:
    admission_knows_no_bound(patch)
    patch.setattr(trainer, "sweep", lambda oldest, *_: oldest < -1)
    patch.setattr(Probe, "watches_admission", False)


def groups_are_trained_as_they_come(patch: pytest.MonkeyPatch) -> None:
    def any_group(self: ReorderBuffer) -> Any:
        if self._held and self.following not in self._held:
            return self._held.pop(max(self._held))
        return take(self)

    take = ReorderBuffer.take
    patch.setattr(ReorderBuffer, "take", any_group)


def a_restarted_trainer_does_not_ask_the_ledger_what_is_done(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trainer, "expected", lambda *_: (0, [], 0))


def a_restarted_trainer_does_not_catch_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trainer, "catch_up", lambda content, step, *_: (content, step))
    patch.setattr(Probe, "rolled_back", lambda *_: None)


def a_writer_does_not_wait_until_readers_have_left_a_segment(patch: pytest.MonkeyPatch) -> None:
    def sealed(self: weights.WriterSegment) -> bool:
        self._segment.inside.clear()
        return seal(self)

    seal = weights.WriterSegment.seal
    patch.setattr(weights.WriterSegment, "seal", sealed)


def nobody_is_started_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "restart", lambda *_: [])


def a_restarted_node_is_not_told_what_it_missed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state_machine.RunStateMachine, "commands_for", lambda *_, **how: [])


WITHOUT: list[tuple[Callable[[pytest.MonkeyPatch], None], range, str]] = [
    (acknowledgements_do_not_wait_for_the_next_node, range(200), "not over"),
    (the_trainer_acknowledges_on_arrival, range(200), "not over|generated again"),
    (a_restarted_source_forgets_what_was_in_flight, range(200), "not over"),
    (what_was_finished_is_not_found_again, range(200), "generated again"),
    (a_group_that_comes_twice_is_done_twice, range(200), "."),
    (admission_knows_no_bound, range(100), "starts under"),
    (nothing_is_swept_and_admission_knows_no_bound, range(100), "versions old"),
    (groups_are_trained_as_they_come, range(100), "after group|out of order|not over"),
    (
        a_restarted_trainer_does_not_ask_the_ledger_what_is_done,
        range(100),
        "not over|would end group",
    ),
    (a_restarted_trainer_does_not_catch_up, range(100), "was recorded"),
    (a_writer_does_not_wait_until_readers_have_left_a_segment, range(500), "a reader holds"),
    (nobody_is_started_again, range(50), "not over"),
    (a_restarted_node_is_not_told_what_it_missed, range(400), "not over"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "seeds", "found"), WITHOUT, ids=[broken.__name__ for broken, *_ in WITHOUT]
)
def test_some_seed_breaks_a_law_where(
    broken: Callable[[pytest.MonkeyPatch], None],
    seeds: range,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken(monkeypatch)
    notice(World, seeds, found)
