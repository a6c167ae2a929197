"""Mathematical equality, by the package math-verify, on made-up answers and on those of GSM8K."""

import json
from pathlib import Path

import pytest

from dataflow import Graph, GraphError
from dataflow.testing import FakeGenerator
from operators import Prompts
from operators.rewards import math_verify
from operators.rewards.match import PackagedScorer

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"


def f(completion: str) -> float:
    return 1.0


def test_a_scorer_whose_package_is_missing_is_refused_with_the_extra_that_has_it() -> None:
    missing = PackagedScorer(function=f, package="no_such_package", extra="math")
    rollouts = FakeGenerator(group_size=1)(Graph("g").source(Prompts(["a"])))
    with pytest.raises(
        GraphError,
        match=r"imports 'no_such_package', which is not installed; pip install .*\[math\]",
    ):
        missing(rollouts)


@pytest.mark.parametrize(
    ("completion", "answer", "worth"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("$x = 3$", "3", 1.0),
        ("The answer is 1,200.", "#### 1200", 1.0),
        (r"$\sqrt{8}$", r"$2\sqrt{2}$", 1.0),
        ("it is 4", "5", 0.0),
        ("no idea", "5", 0.0),
        ("4", "", None),
    ],
)
def test_what_is_equal_mathematically_is_right(
    completion: str, answer: str, worth: float | None
) -> None:
    pytest.importorskip(
        "math_verify", reason="math-verify is not installed; pip install dataflow-rl[math]"
    )
    assert math_verify(completion, answer) == worth


@pytest.mark.slow
def test_the_answers_of_gsm8k_are_right_for_themselves_and_wrong_for_others() -> None:
    pytest.importorskip(
        "math_verify", reason="math-verify is not installed; pip install dataflow-rl[math]"
    )
    files = sorted(GSM8K.rglob("*.jsonl")) if GSM8K.is_dir() else []
    if not files:
        pytest.skip(f"{GSM8K} is not there")
    rows = [json.loads(line) for line in files[0].read_text("utf-8").splitlines()[:200]]
    for row in rows:
        right = row["answer"].rpartition("####")[2].strip()
        assert math_verify(f"Let me think. The answer is {right}.", row["answer"]) == 1.0, row
        assert math_verify(f"The answer is \\boxed{{{right}}}", row["answer"]) == 1.0, row
        assert math_verify("The answer is 123456789.5", row["answer"]) == 0.0, row
