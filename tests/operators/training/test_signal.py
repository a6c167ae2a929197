"""Which scorers are silent: those that give every rollout of a group what they give its
siblings.
"""

from typing import Any

import pyarrow as pa
import pytest
from trainer_rig import group

from operators.training.batches import example, no_signal, silent_scores

SCORES = {"reward": "match.py:10", "length": "mine.py:2"}


def rows(number: int, rewards: list[Any], lengths: list[Any]) -> pa.RecordBatch:
    made = group(number, size=len(rewards))
    for name, values in (("reward", rewards), ("length", lengths)):
        if name in made.schema.names:
            made = made.drop_columns([name])
        made = made.append_column(name, pa.array(values, pa.float64()))
    return made


@pytest.mark.parametrize(
    ("groups", "silent"),
    [
        ([], []),
        ([rows(0, [0, 0, 0], [1, 2, 3])], ["reward"]),
        ([rows(0, [0, 0], [1, 2]), rows(1, [1, 1], [2, 2])], ["reward"]),
        ([rows(0, [0, 0], [1, 1]), rows(1, [1, 1], [2, 2])], ["reward", "length"]),
        ([rows(0, [0, 0], [1, 2]), rows(1, [0, 1], [2, 2])], []),
        ([rows(0, [0, None, 0], [1, 2, 3])], ["reward"]),
        ([rows(0, [None, None], [1, 2])], []),
        ([rows(0, [0], [1])], []),
        ([rows(0, [0.3, 0.1 + 0.2, 0.3], [1, 2, 3])], ["reward"]),
    ],
)
def test_a_scorer_is_silent_that_tells_nobody_from_his_siblings(
    groups: list[Any], silent: list[str]
) -> None:
    assert list(silent_scores(groups, SCORES)) == silent
    said = no_signal(groups, SCORES)
    assert (said or {"scorers": []})["scorers"] == [f"'{name}' ({SCORES[name]})" for name in silent]


def test_an_example_shows_what_was_given_for_what() -> None:
    assert (
        example(rows(0, [0.5, 0.5], [1, 1]), SCORES)
        == "reward 0.5, length 1.0 for the completion '!' of '?'"
    )


def test_values_that_are_lists_or_maps_are_compared_too() -> None:
    """Arrow has no kernel for these: a trainer whose scorers give vectors died of it."""
    near = [[0.3, 1.0], [0.1 + 0.2, 1.0], [0.3, 1.0]]
    same, other = [[0.5, 1.0]] * 3, [[0.5, 1.0], [0.5, 1.0], [0.5]]
    for values, silent in (
        (same, ["parts"]),
        (other, []),
        ([None, None, None], []),
        ([[1.0], None, [1.0]], ["parts"]),
        (near, ["parts"]),
    ):
        made = rows(0, [0, 1, 0], [1, 2, 3]).append_column(
            "parts", pa.array(values, pa.list_(pa.float64()))
        )
        assert list(silent_scores([made], {"parts": "mine.py:9"})) == silent
    maps = pa.array([{"a": 1.0}] * 3, pa.struct([("a", pa.float64())]))
    assert list(
        silent_scores([rows(0, [0, 1, 0], [1, 2, 3]).append_column("m", maps)], {"m": "x"})
    ) == ["m"]
