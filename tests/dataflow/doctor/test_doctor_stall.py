"""When a run that does not move is warned of and ended: laws over any sequence of looks."""

from hypothesis import given
from hypothesis import strategies as st

from dataflow.doctor.history import MOST_BETWEEN_S, Stillness, decide

LIMITS = {"stall_s": 30.0, "slice_s": 200.0}


LOOK = st.tuples(st.booleans(), st.booleans(), st.integers(0, 4))


"""Whether something moved, whether somebody is at work, seconds since the look before."""


LOOKS = st.lists(LOOK, max_size=80)


def after(looks: list[tuple[bool, bool, int]], begin: Stillness | None = None) -> Stillness:
    found, now = (
        begin or Stillness().look(0, False, 0.0),
        0.0 if begin is None else (begin.looked or 0.0),
    )
    mark = found.marks
    for moved, at_work, passed in looks:
        now += passed
        mark = (mark, now) if moved else mark
        found = found.look(mark, at_work, now)
    return found


@given(LOOKS)
def test_what_has_just_moved_is_fine(looks: list[tuple[bool, bool, int]]) -> None:
    found = after([*looks, (True, False, 1.0)])
    assert (found.still_s, found.idle_s) == (0.0, 0.0) and decide(found, **LIMITS) == "fine"


@given(LOOKS)
def test_idle_time_is_never_more_than_still_time_nor_that_more_than_what_passed(
    looks: list[tuple[bool, bool, int]],
) -> None:
    found = after(looks)
    assert 0.0 <= found.idle_s <= found.still_s <= sum(passed for *_, passed in looks) + 1e-9


@given(LOOKS)
def test_looking_on_at_a_run_that_does_not_move_only_makes_it_worse(
    looks: list[tuple[bool, bool, int]],
) -> None:
    order = ["fine", "slow", "stalled"]
    found = after(looks)
    worse = found.look(found.marks, False, (found.looked or 0.0) + 1.0)
    assert order.index(decide(worse, **LIMITS)) >= order.index(decide(found, **LIMITS))


@given(LOOKS)
def test_every_run_that_nobody_works_on_is_warned_of_before_it_is_ended(
    looks: list[tuple[bool, bool, int]],
) -> None:
    found, decisions = after([*looks, (True, False, 0.0)]), []
    for _ in range(70):
        found = found.look(found.marks, False, (found.looked or 0.0) + 1.0)
        decisions.append(decide(found, **LIMITS))
    first = {word: decisions.index(word) + 1 for word in ("slow", "stalled")}
    assert first == {"slow": 30, "stalled": 60}


def test_a_slice_that_takes_long_is_no_stall_within_its_limit_and_one_beyond_it() -> None:
    found, decisions = after([]), []
    for _ in range(410):
        found = found.look(found.marks, True, (found.looked or 0.0) + 1.0)
        decisions.append(decide(found, **LIMITS))
    assert decisions.index("slow") + 1 == 200 and decisions.index("stalled") + 1 == 400


def test_time_in_which_nobody_looked_does_not_count() -> None:
    found = after([]).look(0, False, 86_400.0)
    assert found.still_s == MOST_BETWEEN_S and decide(found, **LIMITS) == "fine"


def test_a_clock_that_goes_back_takes_nothing_back() -> None:
    found = after([(False, False, 4.0)])
    assert found.look(found.marks, False, -5.0).still_s == found.still_s
