"""A run that learns nothing says so: which scorer is silent, in how many groups, with an
example.
"""

import pytest

from dataflow.display import Summary
from dataflow.display.formatting import ASCII, TOLD_AT, Silence, silence
from dataflow.display.views import summary_lines

MUTE = {
    "groups": 4,
    "no_signal": {
        "scorers": ["'reward' (a.py:3)"],
        "example": "reward 0.0 for the completion 'x' of 'y'",
    },
}


LOUD = {"groups": 4, "no_signal": None}


def test_it_is_said_after_some_silent_steps_in_a_row_and_then_ever_more_seldom() -> None:
    found = Silence()
    told = [number for number in range(1, 301) if found.take(MUTE)]
    assert told == [each for each in TOLD_AT if each <= 300]
    assert not found.take(LOUD)
    assert [bool(found.take(MUTE)) for _ in range(3)] == [False, False, True]


def test_what_is_said_names_the_scorer_the_groups_and_a_row() -> None:
    said = silence([MUTE] * 5)
    for part in (
        "'reward' (a.py:3)",
        "all 20 groups",
        "5 steps",
        "reward 0.0 for the completion 'x' of 'y'",
    ):
        assert part in said
    assert "all 4 groups of 1 step, such as" in silence([MUTE])


@pytest.mark.parametrize(
    "lines", [[], [LOUD], [MUTE, LOUD], [LOUD, MUTE, MUTE, MUTE], [{"loss": 1.0}]]
)
def test_a_run_in_which_a_step_had_a_signal_is_not_said_to_have_none(
    lines: list[dict[str, object]],
) -> None:
    assert silence(lines) == ""


def test_of_several_scorers_those_are_named_that_were_silent_throughout() -> None:
    both = {"groups": 1, "no_signal": {"scorers": ["'a' (x)", "'b' (x)"], "example": ""}}
    one = {"groups": 1, "no_signal": {"scorers": ["'b' (x)"], "example": ""}}
    assert "'b' (x) gave" in silence([both, one]) and "'a'" not in silence([both, one])


def test_the_summary_has_it() -> None:
    lines = summary_lines(Summary(graph="g", signal=silence([MUTE] * 5)), ASCII)
    assert any(
        "nothing to learn from: 'reward' (a.py:3)" in "".join(text for text, _ in line)
        for line in lines
    )
