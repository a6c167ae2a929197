"""Credit, as arithmetic."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.data.credit import (
    NONE,
    Credit,
    Holding,
    allot,
    cost,
    may_send,
    next_receiver,
    room_rows,
)

amounts = st.builds(Credit, rows=st.integers(0, 100), bytes=st.integers(0, 1000))


def test_an_empty_batch_is_not_free() -> None:
    assert cost(0, 0) == Credit(rows=1, bytes=1)


@given(amounts, amounts, amounts)
def test_what_is_in_flight_stays_within_the_window_or_is_one_batch(
    batch: Credit, used: Credit, window: Credit
) -> None:
    if may_send(batch, used, window):
        assert used == NONE or (used + batch).within(window)


@given(amounts, amounts)
def test_any_batch_leaves_when_nothing_else_is_in_flight(batch: Credit, window: Credit) -> None:
    assert may_send(batch, NONE, window) == (window.rows > 0 and window.bytes > 0)


@given(amounts, amounts)
def test_room_is_what_the_window_has_left(used: Credit, window: Credit) -> None:
    room = room_rows(used, window)
    assert room == (max(0, window.rows - used.rows) if window.bytes > used.bytes else 0)


@st.composite
def holdings(draw: st.DrawFn) -> tuple[Credit, dict[str, Holding]]:
    """A capacity, and senders that together stay within it."""
    capacity = Credit(rows=draw(st.integers(8, 100)), bytes=draw(st.integers(8, 1000)))
    left, made = capacity, {}
    for index in range(draw(st.integers(1, 5))):
        promised, earlier = draw(amounts).least(left), draw(amounts)
        left -= promised
        earlier = earlier.least(left)
        left -= earlier
        made[f"s{index}"] = Holding(
            promised=promised, held=draw(amounts).least(promised), earlier=earlier
        )
    return capacity, made


@given(holdings(), st.integers(0, 6))
def test_promises_never_exceed_the_capacity(
    given_: tuple[Credit, dict[str, Holding]], expected: int
) -> None:
    capacity, known = given_
    windows = allot(capacity, expected, known)
    assert windows.keys() == known.keys()
    owed = [
        one.promised.most(one.held).most(windows[name]) + one.earlier for name, one in known.items()
    ]
    assert sum(owed, NONE).within(capacity)


@given(st.integers(1, 6), st.integers(0, 6))
def test_idle_senders_get_equal_shares(known: int, expected: int) -> None:
    idle = Holding(promised=NONE, held=NONE, earlier=NONE)
    windows = allot(
        Credit(rows=60, bytes=600), expected, {f"s{index}": idle for index in range(known)}
    )
    count = max(known, expected)
    assert set(windows.values()) == {Credit(rows=60 // count, bytes=600 // count)}


def largest_shares(receivers: int, slack: int, seed: int) -> list[float]:
    """Of each step, the share of its prompts that one receiver took; the receivers of a step give
    their credit back in any order, in parts, as soon as it is trained, and as many prompts follow
    as are then free.
    """
    chance, step, together = random.Random(seed), 32, 4
    most, last = 2 * step + together, -1
    held, owners = [0] * receivers, list[int]()

    def issue() -> None:
        nonlocal last
        while sum(held) + together <= most:
            found = next_receiver([together * most - rows for rows in held], last=last, slack=slack)
            assert found is not None
            last = found
            owners.extend([last] * together)
            held[last] += together

    issue()
    shares = []
    for number in range(100):
        mine = Counter(owners[number * step : (number + 1) * step])
        shares.append(max(mine.values()) / step)
        cuts = {each: chance.randint(0, all_of) for each, all_of in mine.items()}
        parts = [(each, rows) for each, cut in cuts.items() for rows in (cut, mine[each] - cut)]
        for each, rows in chance.sample(parts, len(parts)):
            held[each] -= rows
            issue()
    return shares


@pytest.mark.parametrize("receivers", [2, 4, 8])
def test_all_receivers_share_in_each_step_in_whatever_order_they_give_back_their_credit(
    receivers: int,
) -> None:
    for seed in range(20):
        assert max(largest_shares(receivers, 16, seed)) <= 1 / receivers + 4 / 32
    assert max(largest_shares(receivers, 0, 0)) >= 1.5 / receivers, (
        "by room alone some take the others' share"
    )
