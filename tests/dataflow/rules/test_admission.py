"""Groups start in order, within the staleness bound, when they fit; sources without a bound go
first.
"""

from dataclasses import dataclass

from dataflow.rules import Admission
from dataflow.staleness import Bound


@dataclass
class Waiting:
    group_id: int
    min_version: int = 0
    unstarted: int = 4


def admission(sources, *, in_flight=None, steps=None, staleness=1):
    found = Admission(
        {"train": Bound(max_staleness=staleness, prompts_per_step=2, steps=steps)}, in_flight
    )
    for source, groups in sources.items():
        for group in groups:
            found.add(source, group)
    return found


def started(policy, free=100, slots=100, version=0, dropped=0, *, idle=False, memory=1000):
    found = []

    def fit(group, wanted):
        nonlocal memory
        count = min(wanted, memory)
        memory -= count
        return count

    for source, group, count in policy.start(
        free=free, slots=slots, idle=idle, version=version, dropped=dropped, fit=fit
    ):
        group.unstarted -= count
        found.append((source, group.group_id, count))
    return found


def test_a_group_is_awaited_when_the_next_step_lacks_it_and_others_could_be_made_meanwhile():
    ahead, synchronous = admission({}), admission({}, staleness=0)
    awaited = [ahead.is_awaited("train", Waiting(group), 1, 0) for group in range(6)]
    assert awaited == [True] * 4 + [False] * 2
    assert ahead.is_awaited("train", Waiting(4), 1, 1), "one of the step's was dropped"
    assert not synchronous.is_awaited("train", Waiting(0), 0, 0)
    assert not ahead.is_awaited("held out", Waiting(0), 0, 0)


def test_no_group_starts_further_ahead_than_the_bound():
    policy = admission({"train": [Waiting(i) for i in range(20)]})
    assert [group for _, group, _ in started(policy)] == [0, 1, 2, 3]
    assert started(policy) == []
    assert [group for _, group, _ in started(policy, version=2)] == [4, 5, 6, 7]
    assert [group for _, group, _ in started(policy, version=2, dropped=3)] == [8, 9, 10]


def test_fewer_groups_start_when_fewer_may_be_in_flight():
    policy = admission({"train": [Waiting(i) for i in range(20)]}, in_flight=3)
    assert [group for _, group, _ in started(policy)] == [0, 1, 2]


def test_no_group_beyond_the_last_step_starts():
    policy = admission({"train": [Waiting(i) for i in range(20)]}, steps=3, staleness=50)
    assert [group for _, group, _ in started(policy)] == [0, 1, 2, 3, 4, 5]
    assert [group for _, group, _ in started(policy, dropped=2)] == [6, 7]


def test_a_prompt_waits_for_its_version():
    policy = admission({"held_out": [Waiting(0, 5), Waiting(1, 5)]})
    assert started(policy, version=4) == []
    assert len(started(policy, version=5)) == 2


def test_sources_without_a_bound_go_first_and_do_not_count():
    policy = admission(
        {"train": [Waiting(i) for i in range(9)], "held_out": [Waiting(i) for i in range(9)]}
    )
    assert started(policy, free=40) == [("held_out", i, 4) for i in range(9)] + [("train", 0, 4)]


def test_a_small_group_waits_until_it_fits_as_a_whole():
    policy = admission({"train": [Waiting(0), Waiting(1)]})
    assert started(policy, free=7) == [("train", 0, 4)]
    assert len(policy) == 1


def test_a_group_larger_than_a_quarter_of_the_slots_starts_in_parts():
    policy = admission({"train": [Waiting(0, unstarted=10), Waiting(1)]})
    assert started(policy, free=6, slots=8) == [("train", 0, 6)]
    assert started(policy, free=1, slots=8) == [("train", 0, 1)]
    assert started(policy, free=8, slots=8) == [("train", 0, 3), ("train", 1, 4)]
    assert len(policy) == 0


def test_a_group_waits_for_memory_unless_nothing_else_is_at_work():
    policy = admission({"train": [Waiting(0), Waiting(1)]})
    assert started(policy, memory=3) == []
    assert started(policy, memory=7) == [("train", 0, 4)]
    assert started(policy, memory=3) == []
    assert started(policy, memory=3, idle=True) == [("train", 1, 3)]
    assert started(policy, memory=3) == [("train", 1, 1)]
    assert len(policy) == 0


def test_a_group_that_is_issued_again_starts_before_later_ones():
    policy = admission({"train": [Waiting(3), Waiting(5), Waiting(1), Waiting(4)]}, staleness=50)
    assert [group for _, group, _ in started(policy)] == [1, 3, 4, 5]
