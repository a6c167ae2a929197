"""Pages are counted right whatever is taken, shared, released and found again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples

from operators.engine.attention import page_count
from operators.engine.pages import PAGE, Pages, pages_for
from operators.engine.parking import youngest
from operators.models.folders import ModelError


def tokens(count, first=0):
    return np.arange(first, first + count)


def test_a_known_prefix_is_found_up_to_the_token_before_the_last():
    pages = Pages(8)
    held = pages.take(3)
    pages.remember(tokens(3 * PAGE + 5), held)
    assert pages.find(tokens(3 * PAGE + 5)) == held
    assert pages.find(tokens(3 * PAGE)) == held[:2], (
        "the last token has to be computed, for its logits"
    )
    assert pages.find(np.concatenate([tokens(PAGE), tokens(2 * PAGE, 500)])) == held[:1]
    assert pages.find(tokens(2 * PAGE, 7)) == []


def test_the_page_that_begins_most_alike_is_found_behind_a_known_prefix_while_somebody_holds_it():
    pages = Pages(8)
    begin = tokens(PAGE)
    for alike in (3, 9):
        tail = np.concatenate([tokens(alike, 50), tokens(PAGE - alike, 100 + alike)])
        held = pages.take(2)
        pages.remember(np.concatenate([begin, tail]), held)
    asked = np.concatenate([begin, tokens(9, 50), [7, 7]])
    assert pages.near(asked, 1) == (held[1], 9)
    assert pages.near(asked[:-2], 1) == (held[1], 8), (
        "the last token has to be computed, for its logits"
    )
    assert pages.near(tokens(20, 500), 0) == (-1, 0)
    pages.release(held)
    assert pages.near(asked, 1)[1] == 3
    pages.forget()
    assert pages.near(asked, 1) == (-1, 0)


def test_new_weights_make_every_prefix_unknown():
    pages = Pages(4)
    held = pages.take(2)
    pages.remember(tokens(2 * PAGE), held)
    pages.forget()
    assert pages.find(tokens(3 * PAGE)) == []
    pages.release(held)
    assert pages.available == 4
    pages.remember(tokens(2 * PAGE), [held[0]])
    assert pages.find(tokens(3 * PAGE)) == [held[0]]


def test_idle_prefixes_make_room_those_unused_for_longest_first():
    pages = Pages(3)
    for first in (0, 100, 200):
        held = pages.take(1)
        pages.remember(tokens(PAGE, first), held)
        pages.release(held)
    assert pages.available == 3
    pages.take(1)
    assert [bool(pages.find(tokens(PAGE + 1, first))) for first in (0, 100, 200)] == [
        False,
        True,
        True,
    ]
    with pytest.raises(MemoryError, match="3 pages"):
        pages.take(3)


@examples(200)
@given(st.lists(st.tuples(st.sampled_from("tsrfkm"), st.integers(0, 9)), max_size=60))
def test_no_page_is_lost_or_held_by_surprise(moves):
    pages, rows = Pages(10), []
    for move, number in moves:
        if move == "t" and number <= pages.available:
            rows.append(taken := pages.take(number))
            assert len(set(taken)) == number
        elif move == "s" and rows:
            rows.append(list(rows[number % len(rows)]))
            pages.share(rows[-1])
        elif move == "r" and rows:
            pages.release(rows.pop(number % len(rows)))
        elif move == "f":
            pages.forget()
        elif move == "k" and rows:
            held = rows[number % len(rows)]
            pages.remember(tokens(len(held) * PAGE, number * 1000), held)
            found = pages.find(tokens(len(held) * PAGE + 1, number * 1000))
            assert len(found) <= len(held)
        elif move == "m" and rows:
            ended = rows.pop(number % len(rows))
            if len(set(ended)) and all(pages.holders(page) == 1 for page in ended[-1:]):
                pages.remember(tokens(len(ended) * PAGE - 3, number * 77), ended, tail=True)
            pages.release(ended)
            near, alike = pages.near(tokens(len(ended) * PAGE, number * 77), len(ended[:-1]))
            assert alike <= PAGE and (near == -1) == (alike == 0)
        count = np.bincount([page for row in rows for page in row], minlength=10)
        assert [pages.holders(page) for page in range(10)] == count.tolist()
        assert pages.available == int((count == 0).sum())


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 5)),
        min_size=1,
        max_size=9,
        unique_by=lambda r: r[0],
    ),
    st.integers(0, 30),
)
def test_the_oldest_row_is_never_parked_and_no_more_than_needed(rows, wanted):
    ages, owned = zip(*rows, strict=True)
    parked = youngest(ages, owned, wanted)
    assert ages.index(min(ages)) not in parked
    stay = set(range(len(rows))) - set(parked)
    assert all(ages[p] > ages[s] for p in parked for s in stay)
    assert sum(owned[p] for p in parked[:-1]) < max(wanted, 1)
    if sum(owned[p] for p in parked) < wanted:
        assert len(stay) == 1


def test_a_budget_that_cannot_hold_one_rollout_is_refused_with_the_numbers():
    assert pages_for(1) == pages_for(PAGE) == 1 and pages_for(PAGE + 1) == 2
    assert page_count(slots=4, context_tokens=40, token_bytes=10, budget=10**9) == 12
    assert page_count(slots=4, context_tokens=40, token_bytes=10, budget=5 * PAGE * 10) == 5
    with pytest.raises(
        ModelError,
        match=r"40 tokens take 480 bytes \(10 each\), but its budget is 470.*cache_bytes",
    ):
        page_count(slots=4, context_tokens=40, token_bytes=10, budget=470)
