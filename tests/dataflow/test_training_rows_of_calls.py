"""Calls of a policy as training rows: what was sampled is chosen once, behind what the policy
saw.
"""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples

from dataflow.tokens.rollout_tokens import RolloutTokens, SampledCall, end_to_end, training_rows


def call(prompt: list[int], ids: list[int], version: int = 0) -> SampledCall:
    drawn = RolloutTokens.drawn(np.array(ids), -np.ones(len(ids)) / 2, np.full(len(ids), version))
    return SampledCall(np.array(prompt, np.int32), drawn)


@examples(200)
@given(st.integers(0, 10_000), st.integers(1, 8))
def test_whatever_a_caller_does_to_its_conversation_each_sampled_token_is_chosen_once(
    seed: int, count: int
) -> None:
    """It goes on, goes back and on another way, cuts the past, begins anew, or says the same
    again.
    """
    draw = random.Random(seed)
    histories: list[list[int]] = [[1]]
    calls = []
    for number in range(count):
        before = list(draw.choice(histories))
        if draw.random() < 0.3:
            before = before[draw.randrange(len(before)) :]
        prompt = before + draw.choices([1, 2, 3], k=draw.randrange(3))
        ids = draw.choices([1, 2, 3], k=draw.randrange(4))
        calls.append(call(prompt, ids, number))
        histories.append(prompt + ids)
    rows = training_rows(calls)
    tokens, turns, numbers = end_to_end(rows)
    assert (tokens.mask == (turns >= 0)).all() and (tokens.versions == turns).all()
    said = [number for number, one in enumerate(calls) if len(one.sampled)]
    assert sorted(set(turns[turns >= 0].tolist())) == said
    for row in rows:
        for turn in set(row.turns[row.turns >= 0].tolist()):
            at = np.flatnonzero(row.turns == turn)
            assert row.tokens.ids[: at[0]].tolist() == calls[turn].prompt.tolist()
            assert row.tokens.ids[at].tolist() == calls[turn].sampled.ids.tolist()
    assert numbers.tolist() == [at for at, row in enumerate(rows) for _ in range(len(row.turns))]


def test_calls_that_go_on_from_one_another_are_one_row_and_a_branch_is_another() -> None:
    rows = training_rows(
        [call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 3], [5]), call([1, 2, 3, 4, 9], [6])]
    )
    assert [row.tokens.ids.tolist() for row in rows] == [[1, 2, 3, 4, 9, 6], [1, 2, 3, 5]]
    assert [row.turns.tolist() for row in rows] == [[-1, 0, -1, 1, -1, 3], [-1, -1, -1, 2]]


def test_no_calls_are_no_rows() -> None:
    assert training_rows([]) == [] == training_rows([call([1], [])])
    tokens, turns, rows = end_to_end([])
    assert len(tokens) == len(turns) == len(rows) == 0
