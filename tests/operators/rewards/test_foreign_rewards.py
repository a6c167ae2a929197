"""Reward functions in the forms of other systems, unchanged, in a graph.

The functions under "as their documentation has them" are written to the documented form of each
system, a few lines each: TRL's "Using a custom reward function" (Apache-2.0), verl's "Implement
Reward Function for Dataset" (Apache-2.0), verifiers' "Rubrics" of 0.2 (MIT).
"""

import inspect
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from dataflow import Graph, GraphError, collect
from dataflow.records import ERROR
from dataflow.scorer import Scorer
from dataflow.scoring.failure import RolloutFailure
from dataflow.testing import FakeGenerator
from operators import Prompts
from operators.rewards import (
    combine,
    find,
    from_areal,
    from_openrlhf,
    from_slime,
    from_trl,
    from_verifiers,
    from_verl,
)

CHAT = [{"role": "user", "content": "one"}]


ROWS = [
    {"prompt": "one", "answer": "1", "task": "math"},
    {"prompt": "two", "answer": "none", "task": "code"},
]


def scored(
    reward: Scorer[..., Any],
    rows: list[dict[str, Any]] = ROWS,
    *,
    chat: bool = False,
    size: int = 1,
) -> list[dict[str, Any]]:
    columns = [name for name in rows[0] if name != "prompt"]
    source = Prompts(rows, columns=columns, epochs=1, chat=chat)
    rollouts = FakeGenerator(group_size=size)(Graph("g").source(source))
    found: list[dict[str, Any]] = collect(reward(rollouts), rows=size * len(rows)).to_pylist()
    return sorted(found, key=lambda row: row["group_id"])


def values(rows: list[dict[str, Any]], name: str = "reward") -> list[Any]:
    assert all(row[ERROR] is None for row in rows), [row[ERROR] for row in rows]
    return [row[name] for row in rows]


# As their documentation has them


def reward_len(completions: Any, **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def format_reward_func(completions: Any, **kwargs: Any) -> list[float]:
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^group", content) else 0.0 for content in contents]


def math_reward_func(
    prompts: Any, completions: Any, task: Any, **kwargs: Any
) -> list[float | None]:
    return [
        1.0 if t == "math" else None
        for prompt, completion, t in zip(prompts, completions, task, strict=True)
    ]


async def async_reward_func(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    return [float(prompt in ("one", "two")) for prompt in prompts]


def my_reward_fn(
    data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    return len(solution_str) / 100


def exact_match(completion: Any, answer: str, **kwargs: Any) -> float:
    response = completion if isinstance(completion, str) else completion[-1]["content"]
    return 1.0 if response.strip() == answer.strip() else 0.0


def test_trls_functions_get_lists_of_the_whole_batch_and_their_own_columns() -> None:
    rows = scored(from_trl(reward_len))
    assert values(rows) == [float(len(row["completion"])) for row in rows]
    assert values(scored(from_trl(math_reward_func))) == [1.0, None]
    assert values(scored(from_trl(async_reward_func))) == [1.0, 1.0]


def test_trls_functions_get_messages_where_prompts_are_chats() -> None:
    rows = [{"prompt": CHAT, "answer": "1"}, {"prompt": CHAT, "answer": "2"}]
    found = scored(from_trl(format_reward_func), rows, chat=True)
    assert values(found) == [1.0 if row["completion"].startswith("group") else 0.0 for row in found]

    def shape(prompts: Any, completions: Any) -> list[float]:
        return [
            float(prompt == CHAT and done[0]["role"] == "assistant")
            for prompt, done in zip(prompts, completions)  # noqa: B905
        ]

    assert values(scored(from_trl(shape), rows, chat=True)) == [1.0, 1.0]


def test_trls_functions_get_ids_the_trainers_step_and_log() -> None:
    def everything(
        completions, completion_ids, trainer_state, log_extra, log_metric, answer, **kwargs
    ):  # type: ignore[no-untyped-def]
        assert all(isinstance(each, int) for ids in completion_ids for each in ids)
        log_extra("seen", answer)
        log_metric("share", 0.5)
        return [float(trainer_state.global_step + len(kwargs["task"])) for _ in completions]

    made = from_trl(everything, note=True)
    assert {"task", "versions", "tokens", "mask", "answer"} <= set(made.reads())
    rows = scored(made)
    assert values(rows) == [float(len(rows))] * 2
    assert [json.loads(row["reward_note"]) for row in rows] == [
        {"seen": "1", "share": 0.5},
        {"seen": "none", "share": 0.5},
    ]


def test_verls_functions_get_the_columns_of_its_data_and_give_a_number_or_a_dict() -> None:
    rows = [
        {
            "prompt": "one",
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"index": 3},
        },
    ]
    (row,) = scored(from_verl(my_reward_fn), rows)
    assert values([row]) == [len(row["completion"]) / 100]

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):  # type: ignore[no-untyped-def]
        assert (data_source, ground_truth, extra_info["index"]) == ("sums", "4", 3)
        return {"score": 0.25, "acc": 1}

    (row,) = scored(from_verl(compute_score, note=True), rows)
    assert (values([row]), json.loads(row["reward_note"])) == ([0.25], {"acc": 1})

    def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):  # type: ignore[no-untyped-def]
        return [
            float(len(data_sources) == len(solution_strs) == len(ground_truths) == len(extra_infos))
        ]

    assert values(scored(from_verl(compute_scores), rows)) == [1.0]
    (row,) = scored(from_verl(lambda_free_dict), rows)
    assert "without 'score'" in row[ERROR]
    assert row["reward"] is None


def lambda_free_dict(solution_str: str, ground_truth: str) -> dict[str, float]:
    return {"acc": 1.0}


def test_verifiers_functions_and_rubrics_are_added_by_their_weights() -> None:
    def by_state(state: Any) -> float | None:
        return None if state["answer"] == "none" else float(state["turn"])

    assert values(scored(from_verifiers(exact_match))) == [0.0, 0.0]
    rubric = SimpleNamespace(funcs=[exact_match, by_state], weights=[1.0, 0.5], parser=None)
    rows = scored(from_verifiers(rubric, note=True))
    assert values(rows) == [0.5, 0.0]
    assert json.loads(rows[1]["reward_note"]) == {"exact_match": 0.0, "by_state": None}


def test_verifiers_functions_of_a_group_and_what_a_rubric_gives_by_name() -> None:
    def unique(completions: list[Any], helper: Any) -> list[float]:
        return [helper(completions.count(each)) for each in completions]

    def seen(state: Any) -> float:
        state["seen"] = state.get("seen", 0) + 1
        return float(state["seen"])

    def seen_again(state: Any) -> float:
        return float(state["seen"])

    first = SimpleNamespace(
        funcs=[unique], weights=[1.0], parser=None, class_objects={"helper": lambda n: 1.0 / n}
    )
    second = SimpleNamespace(funcs=[seen, seen_again], weights=[0.0, 10.0], parser=None)
    made = from_verifiers(SimpleNamespace(rubrics=[first, second]), note=True)
    assert made.per == "group" and "helper" not in made.reads()
    rows = scored(made, size=2)
    assert values(rows) == [10.5] * 4  # the siblings say the same
    assert json.loads(rows[0]["reward_note"]) == {"unique": 0.5, "seen": 1.0, "seen_again": 1.0}


def test_slimes_and_areals_functions_get_a_sample_and_keywords() -> None:
    async def custom_rm(args: Any, sample: Any) -> float:
        assert sample.response_length == len(sample.rollout_log_probs) == len(sample.loss_mask)
        assert (sample.status, sample.metadata["task"]) == (
            sample.Status.COMPLETED,
            "math" if sample.label == "1" else "code",
        )
        return float(args.scale * len(sample.response))

    rows = scored(from_slime(custom_rm, label="answer", args={"scale": 2}))
    assert values(rows) == [2.0 * len(row["completion"]) for row in rows]

    def reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):  # type: ignore[no-untyped-def]
        assert isinstance(completion_ids, list)
        assert kwargs["task"] in ("math", "code")
        return len(completions) if answer == "1" else 0

    rows = scored(from_areal(reward_fn))
    assert values(rows) == [float(len(rows[0]["completion"])), 0.0]


def test_openrlhfs_functions_get_queries_and_labels_and_give_tensors_or_a_dict() -> None:
    import numpy as np

    def reward_func(queries, prompts, labels, **kwargs):  # type: ignore[no-untyped-def]
        assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts, strict=True))
        reward = np.array([float(label == "1") for label in labels])
        return {"rewards": reward, "scores": reward, "extra_logs": {"seen": reward + 1}}

    rows = scored(from_openrlhf(reward_func, label="answer", note=True))
    assert values(rows) == [1.0, 0.0]
    assert json.loads(rows[0]["reward_note"]) == {"scores": 1.0, "seen": 2.0}


# What they have in common


def test_what_a_foreign_function_does_wrong_is_the_rows_error_at_its_own_line() -> None:
    def fails(completions, answer):  # type: ignore[no-untyped-def]
        if "none" in answer:
            raise KeyError("no answer")
        return [1.0 for _ in completions]

    good, bad = scored(from_trl(fails))
    assert (good["reward"], good[ERROR], bad["reward"]) == (1.0, None, None)
    failure = RolloutFailure.read(bad[ERROR])
    assert failure.cause == "raised"
    line = inspect.getsourcelines(fails)[1] + 2
    assert f"(test_foreign_rewards.py:{line})" in failure.detail


@pytest.mark.parametrize("note", [False, True])
@pytest.mark.parametrize(
    "returned", [{0: 5.0, 1: 5.0}, {0.0, 1.0}, [1.0, 1.0, 1.0], [1.0], 1.0, "11"], ids=repr
)
def test_what_a_foreign_function_returns_for_several_rows_is_one_value_for_each(
    returned: Any, note: bool
) -> None:
    def queried(queries: list[str]) -> Any:
        return {"rewards": returned}

    def solved(solution_strs: list[str]) -> Any:
        return returned

    def sampled(args: Any, samples: list[Any]) -> Any:
        return returned

    def completed(completions: list[str]) -> Any:
        return returned

    rewards = [
        from_openrlhf(queried, label="answer", note=note),
        from_slime(sampled, label="answer", note=note),
        from_trl(completed, note=note),
        from_verifiers(completed, note=note),
        from_verl(solved, note=note),
    ]
    for reward in rewards:
        for row in scored(reward, ROWS[:1], size=2) if reward.per == "group" else scored(reward):
            assert row["reward"] is None
            assert "for 2 rows; return one" in row[ERROR]


def test_a_column_that_a_foreign_function_takes_is_asked_for_when_the_graph_is_built() -> None:
    def wants(completions, **kwargs):  # type: ignore[no-untyped-def]
        return [1.0 if kwargs["reference"] else None for _ in completions]

    for made in (from_trl(wants), from_trl(math_reward_func), from_verl(my_reward_fn)):
        rollouts = FakeGenerator(group_size=1)(
            Graph("g").source(Prompts(ROWS, columns=("answer",)))
        )
        with pytest.raises(
            GraphError, match=r"'reward' reads column '(reference|task|data_source|reward_model)'"
        ):
            made(rollouts)


def test_rewards_that_do_not_apply_are_left_out_of_a_sum_and_of_the_groups_mean() -> None:
    reward = combine({"math": 1.0, "length": 0.1})
    columns = ["answer", "task"]
    rollouts = FakeGenerator(group_size=1)(
        Graph("g").source(Prompts(ROWS, columns=columns, epochs=1))
    )
    found = reward(
        from_trl(reward_len, name="length")(from_trl(math_reward_func, name="math")(rollouts))
    )
    rows = sorted(collect(found, rows=2).to_pylist(), key=lambda row: row["group_id"])
    first, second = values(rows)
    assert math.isclose(first, 1.0 + 0.1 * len(rows[0]["completion"]))
    assert math.isclose(second, 0.1 * len(rows[1]["completion"]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_trl(3), "3 is a int, which cannot be"),
        (lambda: from_trl(lambda *a: a), r"takes '\*a' by position, but TRL gives keywords"),
        (lambda: from_slime(lambda args, other: 1.0), r"takes \['other'\] beside args"),
        (lambda: from_verifiers(lambda trace: 1.0), "a reward of verifiers v1"),
        (
            lambda: from_verifiers(SimpleNamespace(funcs=[exact_match], weights=[])),
            "1 reward functions and 0 weights",
        ),
    ],
)
def test_what_cannot_be_called_so_is_refused(make: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()


def test_a_reward_of_another_system_is_found_by_its_form_file_and_name(tmp_path: Path) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(
        "def accuracy(completions, answer, **kwargs):\n"
        "    return [float(text == known) for text, known in zip(completions, answer)]\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == ground_truth)\n"
    )
    reward = find(f"trl:{file}:accuracy")
    assert (reward.name, reward.output) == ("reward", pa.float64())
    assert reward(prompt=["a"], completion=["7"], answer=["7"]) == [1.0]
    assert "reward_model" in find(f"verl:{file}:compute_score").reads()
    assert find("operators.rewards.match:exact").name == "reward"
    with pytest.raises(GraphError, match="names module 'no_such_module', which cannot be imported"):
        find("trl:no_such_module:accuracy")


# The packages' own functions


@pytest.mark.slow
def test_trls_own_reward_functions_run_unchanged() -> None:
    pytest.importorskip("trl", reason="trl is not installed; pip install dataflow-rl[bench]")
    rows = [{"prompt": CHAT, "solution": "4"}]
    assert values(scored(find("trl:trl.rewards:think_format_reward"), rows, chat=True)) == [0.0]
    pytest.importorskip(
        "math_verify", reason="math-verify is not installed; pip install dataflow-rl[math]"
    )
    rows = [{"prompt": CHAT, "solution": r"\frac{1}{3}"}, {"prompt": CHAT, "solution": ""}]
    assert values(scored(find("trl:trl.rewards:accuracy_reward"), rows, chat=True)) == [0.0, None]


@pytest.mark.slow
def test_verls_own_compute_score_runs_unchanged() -> None:
    pytest.importorskip(
        "verl", reason="verl is not installed, and needs CUDA for most of it; pip install verl"
    )
    reward = find("verl:verl.utils.reward_score.gsm8k:compute_score")
    assert reward(completion="so it is #### 4", reward_model={"ground_truth": "4"}) == 1.0
    reward = find("verl:verl.utils.reward_score:default_compute_score")
    row = {"prompt": "one", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "4"}}
    assert values(scored(reward, [row])) == [0.0]
