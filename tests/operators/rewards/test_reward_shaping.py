"""Rewards put together and shaped, against numbers worked out by hand; and a filter for groups
without signal.
"""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dataflow import Graph, GraphError, collect, scorer
from dataflow.runtime import Batch, Context
from dataflow.testing import FakeGenerator, FakePrompts
from operators.filters import has_signal
from operators.rewards import combine, kl_penalty, overlong


@scorer(isolate=False)
def accuracy(answer: str) -> float:
    return float(answer)


@scorer(isolate=False)
def format(completion: str) -> int:
    if completion == "2":
        raise ValueError("no format")
    return 5


@scorer(isolate=False)
def note(completion: str) -> str:
    return completion


def rollouts() -> Any:
    return FakeGenerator(group_size=1)(Graph("g").source(FakePrompts(size=4)))


# combine


def test_rewards_are_added_by_their_weights_and_a_row_that_lacks_one_has_none() -> None:
    reward = combine({"accuracy": 1.0, "format": 0.2})
    table = collect(reward(format(accuracy(rollouts()))), rows=4)
    assert table.column("reward").to_pylist() == [1.0, 2.0, None, 4.0]
    assert table.column("error").to_pylist()[2].startswith("format: raised: ValueError: no format")


def test_called_with_plain_values_it_is_their_sum() -> None:
    assert combine({"a": 0.1, "b": -2.0, "c": 1})(a=3.0, b=0.5, c=-1.0) == pytest.approx(
        -1.7, abs=1e-15
    )


def test_a_column_that_is_not_there_or_no_number_is_refused_when_the_graph_is_built() -> None:
    with pytest.raises(GraphError, match=r"'reward' reads column 'formal', but 'note' provides"):
        combine({"accuracy": 1.0, "formal": 0.2})(note(accuracy(rollouts())))
    with pytest.raises(GraphError, match=r"'reward' reads column 'note' as float"):
        combine({"accuracy": 1.0, "note": 0.2})(note(accuracy(rollouts())))


def test_equal_sums_are_one_operator_of_the_graph_and_others_are_not() -> None:
    g = Graph("g")
    generator, made = FakeGenerator(group_size=1), []
    for source in ("prompts", "held_out"):
        made.append(
            combine({"accuracy": 0.5})(accuracy(generator(g.source(FakePrompts(name=source)))))
        )
    assert [stream.node for stream in made] == ["reward", "reward"]
    assert list(g.operators) == ["prompts", "generator", "accuracy", "reward", "held_out"]
    assert g.operators["reward"].knobs()["weights"] == {"accuracy": 0.5}
    assert combine({"accuracy": 0.5}).identity() != combine({"accuracy": 0.6}).identity()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, r"needs weights by column, but got \{\}; give it"),
        ({"a": math.nan}, "got the weight nan for 'a', which is no finite number"),
        ({"a": True}, "got the weight True for 'a'"),
        ({"a b": 1.0}, "got 'a b' as a column"),
        ({"reward": 1.0}, "writes column 'reward', which it also reads"),
    ],
)
def test_sums_that_cannot_be_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Graph("g").apply(combine(weights), rollouts_with_reward())


def rollouts_with_reward() -> Any:
    return scorer(name="reward", isolate=False)(accuracy.function)(rollouts())


# Length


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [(0, 0.0), (12, 0.0), (13, -0.125), (16, -0.5), (19, -0.875), (20, -1.0), (25, -1.0)],
)
def test_the_soft_overlong_punishment_is_dapos_equation_13(tokens: int, wanted: float) -> None:
    """L_max = 20, L_cache = 8."""
    mask = np.array([False] * 7 + [True] * tokens)
    assert overlong(max_tokens=20, buffer_tokens=8)(mask) == wanted


def test_the_tokens_of_the_prompt_are_no_part_of_the_length() -> None:
    mask = np.array([False, True, False, True, True])
    assert overlong(max_tokens=4, buffer_tokens=2)(mask) == -0.5


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (
            {"max_tokens": 8, "buffer_tokens": 9},
            r"the last 9 tokens \(buffer_tokens\) of 8 \(max_tokens\)",
        ),
        ({"max_tokens": 8, "buffer_tokens": 0}, "buffer_tokens=0, which is no number of tokens"),
        ({"max_tokens": 8.0, "buffer_tokens": 2}, "max_tokens=8.0, which is no number of tokens"),
    ],
)
def test_an_impossible_buffer_is_refused(knobs: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        overlong(**knobs)


# Distance


def test_the_penalty_is_the_summed_log_ratio_of_the_chosen_tokens_alone() -> None:
    found = kl_penalty(
        np.array([9.0, -1.0, -2.0, 9.0, -0.5]),
        np.array([0.0, -1.5, -1.0, 0.0, -3.5]),
        np.array([False, True, True, False, True]),
        beta=0.1,
    )
    assert found == pytest.approx(-0.1 * (0.5 - 1.0 + 3.0), abs=1e-12)


def test_its_mean_over_what_the_policy_draws_is_beta_times_the_divergence() -> None:
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    values = [
        kl_penalty(np.log([p]), np.log([q]), np.array([True]))
        for p, q in zip(policy, reference, strict=True)
    ]
    assert float(policy @ values) == pytest.approx(
        -0.02 * float((policy * np.log(policy / reference)).sum()), abs=1e-15
    )


def test_penalties_work_on_rows_as_they_travel() -> None:
    rows = pa.RecordBatch.from_pydict(
        {
            "group_id": pa.array([0, 0]),
            "mask": pa.array([[False, True, True], [False, True]]),
            "logprobs": pa.array([[0.0, -1.0, -2.0], [0.0, -1.0]], pa.list_(pa.float32())),
            "ref_logprobs": pa.array([[0.0, -2.0, -2.0], [0.0, -0.5]], pa.list_(pa.float32())),
            "error": pa.nulls(2, pa.string()),
        }
    )
    for made, wanted in (
        (kl_penalty.configured(beta=1.0), [-1.0, 0.5]),
        (overlong(max_tokens=2, buffer_tokens=2), [-1.0, -0.5]),
    ):
        runtime = made.build(Context(node=made.name))
        runtime.push(Batch("prompts", rows))
        (batch,) = runtime.work() or []
        assert batch.records.column(made.name).to_pylist() == pytest.approx(wanted)


# Filters


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([1.0, 1.0], False), ([0.0, 1.0], True), ([0.1] * 10, False), ([0.3], False)],
)
def test_groups_of_equal_rewards_have_no_signal(rewards: list[float], kept: bool) -> None:
    """Also where the mean of equal numbers is not that number, in floating point."""
    assert has_signal(np.array(rewards)) is kept
