"""Rewards from text: exact, by number, or a user's own function named on the command line."""

from pathlib import Path

import pytest

from dataflow import GraphError
from operators.rewards import find
from operators.rewards.match import exact, last_number, number


@pytest.mark.parametrize(
    ("completion", "answer", "worth"),
    [("24", "24", 1.0), (" 24\n", "24", 1.0), ("24.0", "24", 0.0), ("", "24", 0.0)],
)
def test_exact_compares_text_without_the_blanks_around_it(
    completion: str, answer: str, worth: float
) -> None:
    assert exact(completion, answer) == worth


@pytest.mark.parametrize(
    ("completion", "answer", "worth"),
    [
        ("so it is 24.", "#### 24", 1.0),
        ("1,200", "1200.0", 1.0),
        ("3 then 7", "7", 1.0),
        ("3 then 7", "3", 0.0),
        ("-5", "5", 0.0),
        ("50%", "0.5", 1.0),
        ("$ .5", "0.50", 1.0),
        ("none", "5", 0.0),
        ("5", "none", 0.0),
    ],
)
def test_number_compares_the_last_numbers_exactly(
    completion: str, answer: str, worth: float
) -> None:
    assert number(completion, answer) == worth


def test_a_text_without_a_number_has_none() -> None:
    assert last_number("no digits") is None


def test_a_reward_of_ones_own_is_found_by_file_and_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(completion: str) -> float:\n    return float(len(completion))\n")
    reward = find(f"{file}:score")
    assert reward.name == "reward"
    assert reward("abc") == 3.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exat", "no reward is called 'exat'.*did you mean 'exact'"),
        ("nowhere.py:score", "names a file that is not there"),
        ("{file}:scor", "has no reward 'scor'"),
        ("{broken}:score", "cannot be imported: SyntaxError"),
    ],
)
def test_a_reward_that_cannot_be_found_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.py").write_text("def score(completion: str) -> float:\n    return 1.0\n")
    (tmp_path / "broken.py").write_text("def score(:\n")
    with pytest.raises(GraphError, match=message):
        find(text.format(file=tmp_path / "mine.py", broken=tmp_path / "broken.py"))
