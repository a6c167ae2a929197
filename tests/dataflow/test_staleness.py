"""The law of staleness: in-order consumption and the admission rule bound the age, and never
deadlock.
"""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples

from dataflow.staleness import NO_TOKEN, admissible, admit, oldest_versions, sweep
from dataflow.tokens.ragged import staleness_at, staleness_parts


class Loop:
    """A generator and a trainer that take turns in any order; groups keep the version they started
    under.
    """

    def __init__(
        self, prompts_per_step: int, max_staleness: int, limit: int | None, drops: set[int]
    ) -> None:
        self.prompts_per_step, self.max_staleness, self.limit = (
            prompts_per_step,
            max_staleness,
            limit,
        )
        self.drops = drops
        self.generator_version = self.trainer_version = self.told = 0
        self.started: list[int] = []
        self.finished: set[int] = set()
        self.place = self.passed = 0
        self.batch: list[int] = []
        self.ages: list[int] = []

    def adopt(self) -> bool:
        """The generator takes the newest weights, and the trainer's count of groups it passed."""
        moved = (self.generator_version, self.told) != (self.trainer_version, self.passed)
        self.generator_version, self.told = self.trainer_version, self.passed
        return moved

    def start_one(self) -> bool:
        rule = (self.prompts_per_step, self.max_staleness, self.limit)
        if not admit(len(self.started), self.told, self.generator_version, *rule):
            return False
        self.started.append(self.generator_version)
        return True

    def finish_one(self, pick: int) -> bool:
        open_groups = [group for group in range(len(self.started)) if group not in self.finished]
        if not open_groups:
            return False
        self.finished.add(open_groups[pick % len(open_groups)])
        return True

    def train(self) -> bool:
        """Consume finished groups in issue order, passing dropped ones, up to one step."""
        before = self.place
        while self.place in self.finished and len(self.batch) < self.prompts_per_step:
            if self.place in self.drops:
                self.passed += 1
            else:
                self.batch.append(self.place)
            self.place += 1
        if len(self.batch) == self.prompts_per_step:
            self.ages += [self.trainer_version - self.started[group] for group in self.batch]
            self.batch = []
            self.trainer_version += 1
            return True
        return self.place > before


@examples(150)
@given(
    prompts_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    slack=st.none() | st.integers(0, 4),
    drops=st.sets(st.integers(0, 60), max_size=40),
    turns=st.lists(
        st.tuples(st.sampled_from(["adopt", "start", "finish", "train"]), st.integers(0, 9)),
        max_size=300,
    ),
)
def test_with_consumption_in_order_admission_alone_bounds_the_age_and_never_deadlocks(
    prompts_per_step: int,
    max_staleness: int,
    slack: int | None,
    drops: set[int],
    turns: list[tuple[str, int]],
) -> None:
    limit = None if slack is None else prompts_per_step + slack
    loop = Loop(prompts_per_step, max_staleness, limit, drops)
    for turn, pick in turns:
        if turn == "finish":
            loop.finish_one(pick)
        else:
            {"adopt": loop.adopt, "start": loop.start_one, "train": loop.train}[turn]()
    aim = loop.trainer_version + 8
    while loop.trainer_version < aim:
        moved = [loop.adopt(), loop.start_one(), loop.finish_one(0), loop.train()]
        assert any(moved), "deadlock"
    assert max(loop.ages) <= max_staleness
    assert min(loop.ages) >= 0


def test_the_bound_is_reached_so_admission_throws_no_overlap_away() -> None:
    loop = Loop(2, 3, None, set())
    while loop.start_one():
        loop.finish_one(0)
    while loop.train():
        pass
    assert max(loop.ages) == 3


def test_synchronous_training_starts_one_step_of_groups_per_version() -> None:
    assert admissible(0, 0, 0, 32, 0) == 32
    assert not admit(32, 0, 0, 32, 0)
    assert admit(32, 0, 1, 32, 0)
    assert admit(32, 1, 0, 32, 0)


@given(
    group=st.integers(0, 100),
    dropped=st.integers(0, 20),
    version=st.integers(0, 20),
    prompts=st.integers(1, 8),
    staleness=st.integers(0, 5),
    limit=st.none() | st.integers(1, 60),
)
def test_admissible_counts_exactly_the_groups_that_admit_lets_in(
    group: int, dropped: int, version: int, prompts: int, staleness: int, limit: int | None
) -> None:
    rule = (dropped, version, prompts, staleness, limit)
    number = admissible(group, *rule)
    assert all(admit(group + ahead, *rule) for ahead in range(number))
    assert not admit(group + number, *rule)
    if limit is None:
        assert admit(group, *rule) == (group - dropped < (version + staleness + 1) * prompts)


def test_a_limit_in_flight_holds_back_what_staleness_would_allow() -> None:
    assert admissible(0, 0, 0, 32, 4) == 160
    assert admissible(0, 0, 0, 32, 4, in_flight_limit=64) == 64
    assert admissible(40, 0, 1, 32, 4, in_flight_limit=64) == 56


@given(st.lists(st.lists(st.integers(-1, 9), max_size=5), max_size=8), st.integers(0, 3))
def test_the_oldest_version_of_each_rollout_is_that_of_its_oldest_chosen_token(
    rows: list[list[int]], skipped: int
) -> None:
    column = pa.array([[0]] * skipped + rows, pa.list_(pa.int32())).slice(skipped)
    expected = [min((version for version in row if version >= 0), default=NO_TOKEN) for row in rows]
    assert oldest_versions(column).tolist() == expected
    assert oldest_versions(pa.chunked_array([column, column])).tolist() == expected * 2


@given(st.lists(st.lists(st.integers(-1, 9), max_size=5), max_size=8), st.integers(10, 12))
def test_versions_made_while_generating_and_while_waiting_add_up_to_the_staleness(
    rows: list[list[int]], step: int
) -> None:
    column = pa.array(rows, pa.list_(pa.int32()))
    drawn = [[version for version in row if version >= 0] for row in rows]
    generating, waiting = (part.to_pylist() for part in staleness_parts(step, column))
    assert generating == [max(row) - min(row) if row else None for row in drawn]
    assert waiting == [step - 1 - max(row) if row else None for row in drawn]
    whole = staleness_at(step, column).to_pylist()
    assert whole == [
        None if one is None else one + other for one, other in zip(generating, waiting, strict=True)
    ]


@pytest.mark.parametrize(
    ("bound", "stale"), [(0, [True, True, False, False]), (1, [True, False, False, False])]
)
def test_the_sweep_finds_what_is_older_than_the_bound(bound: int, stale: list[bool]) -> None:
    assert sweep(np.array([3, 4, 5, NO_TOKEN]), 5, bound).tolist() == stale
