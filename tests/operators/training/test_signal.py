"""Which scorers are silent: those that give every rollout of a group what they give its siblings."""

from typing import Any

import pyarrow as pa
import pytest
from trainer_rig import group

from operators.training.signal import example, no_signal, silent_scores

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
    ],
)
def test_a_scorer_is_silent_that_tells_nobody_from_his_siblings(groups: list[Any], silent: list[str]) -> None:
    assert list(silent_scores(groups, SCORES)) == silent
    said = no_signal(groups, SCORES)
    assert (said or {"scorers": []})["scorers"] == [f"'{name}' ({SCORES[name]})" for name in silent]


def test_an_example_shows_what_was_given_for_what() -> None:
    assert example(rows(0, [0.5, 0.5], [1, 1]), SCORES) == "reward 0.5, length 1.0 for the completion '!' of '?'"
