"""Laws of @scorer: what a function becomes, what is refused, and that every row comes back once."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.node import Stream, Weights
from dataflow.records import ERROR, Array
from dataflow.scorer import Scorer, scorer
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer


@scorer
def reward(completion: str, answer: str, bonus: float = 0.0) -> float:
    """1 if the completion is the answer."""
    return float(completion == answer) + bonus


@scorer(per="group", isolate=False)
def advantage(reward: Array) -> Array:
    """Reward minus the group's mean."""
    return np.asarray(reward - reward.mean())


# Declaration


def test_a_scorer_is_an_operator_named_and_documented_like_its_function() -> None:
    assert isinstance(reward, Scorer)
    assert reward.name == vars(reward)["__name__"] == "reward"
    assert reward.__doc__ == "1 if the completion is the answer."
    assert list(inspect.signature(reward).parameters) == ["completion", "answer", "bonus"]
    assert reward.reads() == {"completion": str, "answer": str}
    assert reward.provides({"x": pa.int64()}) == {
        "x": pa.int64(),
        ERROR: pa.string(),
        "reward": pa.float64(),
    }
    assert (reward.light, reward.state, reward.kind) == (True, "scored", "operator")


def test_a_scorer_called_with_plain_values_is_the_function() -> None:
    assert reward("abc", answer="abc") == 1.0
    assert reward("abc", "c", bonus=2.0) == 2.0
    assert reward.configured(bonus=0.5)("a", "b") == 0.5
    assert advantage(np.array([1.0, 3.0])).tolist() == [-1.0, 1.0]


def rollouts() -> Stream[Any]:
    return FakeGenerator(group_size=2)(Graph("g").source(FakePrompts(columns={"answer": str})))


def test_a_scorer_applied_to_a_stream_adds_its_column() -> None:
    stream = advantage(reward(rollouts(), bonus=0.5))
    assert (stream.columns["reward"], stream.columns["advantage"]) == (pa.float64(), pa.float64())
    assert stream.graph.operators["reward"].knobs() == {"bonus": 0.5}
    assert "other" in reward.renamed("other")(rollouts()).columns


def test_applications_with_equal_knobs_are_one_node() -> None:
    assert reward.configured(bonus=1.0).identity() == reward.configured(bonus=1.0).identity()
    assert reward.configured(bonus=1.0).identity() != reward.configured(bonus=1).identity()
    assert reward.configured(bonus=1.0).identity() != reward.identity()
    assert reward.renamed("other").identity() != reward.identity()
    hash(reward.configured(bonus=[1, {"a": np.zeros(2)}]).identity())


def test_an_unknown_knob_names_the_nearest_and_the_line_of_the_function() -> None:
    with pytest.raises(
        GraphError, match=r"'reward' \(test_scorer\.py:\d+\) has no knob 'bonsu'.*'bonus'\?"
    ):
        reward(rollouts(), bonsu=1.0)
    with pytest.raises(GraphError, match="'answer' is a column it reads"):
        reward(rollouts(), answer="x")
    with pytest.raises(GraphError, match="its knobs are \\[\\]"):
        advantage(rollouts(), lam=1.0)


def test_a_scorer_takes_one_stream_and_no_weights() -> None:
    with pytest.raises(GraphError, match="takes one stream, but got 2"):
        reward(rollouts(), rollouts())  # type: ignore[call-overload]
    with pytest.raises(GraphError, match="takes rows, but got the weights of"):
        reward(Weights(FakeTrainer()))  # type: ignore[call-overload]


def test_a_scorer_that_writes_what_it_reads_has_a_fault() -> None:
    assert reward.faults() == []
    assert "writes column 'answer', which it also reads" in reward.renamed("answer").faults()[0]


def f_plain(x: str):
    return 1.0  # type: ignore[no-untyped-def]


def f_float(x: str) -> float:
    return 1.0


def f_optional(x: str) -> float | None:
    return 1.0


def f_int(x: str) -> int:
    return 1


def f_bool(x: str) -> bool:
    return True


def f_str(x: str) -> str:
    return x


def f_list(x: str) -> list[float]:
    return [1.0]


def f_ints(x: str) -> list[int]:
    return [1]


def f_words(x: str) -> list[str]:
    return ["a"]


def f_array(x: str) -> Array:
    return np.ones(1)


def f_numpy(x: str) -> np.float32:
    return np.float32(1)


async def f_async(x: str) -> float:
    return 1.0


def g_plain(x: Array):
    return x  # type: ignore[no-untyped-def]


def g_array(x: Array) -> Array:
    return x


def g_arrays(x: list[Array]) -> list[Array]:
    return x


def g_floats(x: list[float]) -> list[float]:
    return x


def g_words(x: list[str]) -> list[str]:
    return x


def g_float(x: Array) -> float:
    return 1.0


ROW_TYPES = [
    (f_plain, pa.float64()),
    (f_float, pa.float64()),
    (f_optional, pa.float64()),
    (f_int, pa.int64()),
    (f_bool, pa.bool_()),
    (f_str, pa.string()),
    (f_list, pa.list_(pa.float32())),
    (f_ints, pa.list_(pa.int64())),
    (f_words, pa.list_(pa.string())),
    (f_array, pa.list_(pa.float32())),
    (f_numpy, pa.float64()),
    (f_async, pa.float64()),
]
GROUP_TYPES = [
    (g_plain, pa.float64()),
    (g_array, pa.float64()),
    (g_arrays, pa.list_(pa.float32())),
    (g_float, pa.float64()),
    (g_floats, pa.float64()),
    (g_words, pa.string()),
]


@pytest.mark.parametrize(("function", "kind"), ROW_TYPES)
def test_the_return_annotation_is_the_columns_type(
    function: Callable[..., Any], kind: pa.DataType
) -> None:
    assert scorer(function).output == kind


@pytest.mark.parametrize(("function", "kind"), GROUP_TYPES)
def test_a_group_function_answers_with_one_value_for_each_row(
    function: Callable[..., Any], kind: pa.DataType
) -> None:
    made = scorer(per="group")(function)
    assert made.output == kind
    assert made.reads()["x"] == {g_floats: float, g_words: str}.get(function, made.reads()["x"])


def none(x: str) -> None: ...
def star(*x: str) -> float:
    return 1.0


def stars(x: str, **y: str) -> float:
    return 1.0


def by_position(x: str, /) -> float:
    return 1.0


def mutable(x: str, y: list[int] = []) -> float:  # noqa: B006
    return 1.0


def only_knobs(x: int = 1) -> float:
    return 1.0


def strange(x: str) -> dict[str, int]:
    return {}


def generator(x: str) -> Any:
    yield 1.0


async def async_generator(x: str) -> Any:
    yield 1.0


def unknown(x: "Missing") -> float:  # type: ignore[name-defined] # noqa: F821
    return 1.0


class Callable_:
    def __call__(self, x: str) -> float:
        return 1.0


@pytest.mark.parametrize(
    "function",
    [
        none,
        star,
        stars,
        by_position,
        mutable,
        only_knobs,
        strange,
        generator,
        async_generator,
        unknown,
        lambda x: 1.0,
        len,
        int,
        Callable_(),
        3,
    ],
)
def test_a_function_that_cannot_be_a_scorer_is_refused_with_what_to_do(function: Any) -> None:
    with pytest.raises(GraphError) as refused:
        scorer(function)
    text = str(refused.value)
    assert "scorer" in text
    assert ";" in text or ", but" in text, "a message has what was found and what to do"


@pytest.mark.parametrize(
    "limits",
    [
        {"per": "step"},
        {"retries": -1},
        {"world": ValueError},
        {"timeout_s": 0},
        {"timeout_s": float("inf")},
        {"timeout_s": "1"},
        {"memory_mb": 0},
        {"concurrency": 0},
        {"concurrency": True},
        {"processes": 1.5},
        {"isolate": False, "timeout_s": 1.0},
        {"isolate": False, "processes": 2},
        {"timeout": 3},
    ],
)
def test_limits_that_cannot_be_kept_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(
        GraphError, match=next(iter(limits)) if "isolate" not in limits else "isolate=False"
    ):
        scorer(**limits)(f_float)


def test_an_async_function_inside_the_worker_is_refused() -> None:
    with pytest.raises(GraphError, match="is an async function with isolate=False"):
        scorer(isolate=False)(f_async)


# The type checker's view

USER = """
from typing import Any
from dataflow.records import Array
from dataflow.scorer import scorer
from dataflow.node import Weights
from dataflow.node import Rollout, Stream

@scorer
def reward(completion: str, answer: str) -> float:
    return float(completion == answer)

@scorer(per="group", timeout_s=1.0)
def credit(reward: Array, lam: float = 0.9) -> Array:
    return reward

def use(rollouts: Stream[Rollout], weights: Weights) -> Stream[Rollout]:
    number: float = reward("a", answer="b")
    plain: Array = credit.configured(lam=0.5)(credit.function(reward=None))  # error: arg-type
    reward(1, "b")  # error: call-overload
    reward(weights)  # error: call-overload
    return credit(reward.renamed("other")(rollouts), lam=0.5)
"""


@pytest.mark.slow
def test_a_type_checker_knows_both_uses_of_a_scorer(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    root = Path(__file__).parents[2]
    config = root / "pyproject.toml"
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", config, tmp_path / "user.py"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {
        int(line.split(":")[1])
        for line in checked.stdout.splitlines()
        if "user.py" in line and "error" in line
    }
    assert found == {at for at, line in enumerate(USER.splitlines(), 1) if "# error" in line}, (
        checked.stdout
    )
