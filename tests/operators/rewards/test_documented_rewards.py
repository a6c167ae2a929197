"""Reward functions as the documentation of TRL, verl and verifiers has them, read in a checkout and
run unchanged.

DATAFLOW_TRL_CHECKOUT, DATAFLOW_VERL_CHECKOUT, DATAFLOW_VERIFIERS_CHECKOUT: folders of the projects'
repositories.
"""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from documents_rig import DocumentedFunction, called_with, checkout, functions

from dataflow import Graph, collect
from dataflow.records import ERROR
from dataflow.scorer import Scorer
from dataflow.testing import FakeGenerator
from operators import Prompts
from operators.rewards import find, from_verifiers

pytestmark = pytest.mark.slow


CHAT = [{"role": "user", "content": "one"}]


ROW = {
    "ground_truth": "5",
    "task": "math",
    "answer": "group",
    "info": json.dumps({"required_keywords": ["o", "three"]}),
    "data_source": "openai/gsm8k",
    "reward_model": {"ground_truth": "4"},
    "extra_info": {"split": "train"},
}


"""What the functions that are documented ask for."""


def scored(reward: Scorer[..., Any], *, chat: bool) -> list[dict[str, Any]]:
    """Two rollouts of a prompt each of two, through a graph; the fake generator says `group N,
    sibling M`.
    """
    rows = [{"prompt": CHAT if chat else text, **ROW} for text in ("one", "two")]
    rollouts = FakeGenerator(group_size=2)(
        Graph("g").source(Prompts(rows, columns=list(ROW), epochs=1, chat=chat))
    )
    return collect(reward(rollouts), rows=4).to_pylist()  # type: ignore[no-any-return]


def is_of(function: DocumentedFunction, *names: str) -> bool:
    return any(name in function.arguments for name in names)


def test_trls_documented_functions_give_what_their_page_says(tmp_path: Path) -> None:
    page = functions(checkout("DATAFLOW_TRL_CHECKOUT"), "docs/source/grpo_trainer.md")
    found = [
        each
        for each in page
        if is_of(each, "completions", "completion_ids") and "..." not in each.source
    ]
    assert len(found) >= 8, list(map(str, found))
    shown = 0
    for function in found:
        reward = find(f"trl:{function.written(tmp_path)}")
        rows = scored(reward, chat='["content"]' in function.source)
        helpers = "check_math_solution" in function.source
        assert all((row[ERROR] is None) != helpers for row in rows), (str(function), rows[0][ERROR])
        if not function.example:
            continue
        given, wanted = called_with(function)
        columns = {
            name: value for name, value in given.items() if name not in ("prompts", "completions")
        }
        if "completion_ids" in columns and "completion_ids" in function.arguments:
            ids: Any = columns.pop("completion_ids")
            columns |= {
                "tokens": [_array([0, *row]) for row in ids],
                "mask": [_mask(len(row)) for row in ids],
            }
        columns.pop("completion_ids", None)
        prompts, completions = given["prompts"], given["completions"]
        assert isinstance(prompts, list) and isinstance(completions, list)
        columns["prompt"] = [
            each if isinstance(each, str) else json.dumps(each) for each in prompts
        ]
        columns["completion"] = [
            each if isinstance(each, str) else each[0]["content"] for each in completions
        ]
        assert list(reward(**columns)) == wanted, str(function)
        shown += 1
    assert shown >= 4


def test_verls_documented_function_gives_what_it_would_there(tmp_path: Path) -> None:
    page = functions(checkout("DATAFLOW_VERL_CHECKOUT"), "docs/preparation/reward_function.rst")
    found = [each for each in page if is_of(each, "solution_str")]
    assert found
    for function in found:
        rows = scored(find(f"verl:{function.written(tmp_path)}"), chat=False)
        assert [row["reward"] for row in rows] == [len(row["completion"]) / 100 for row in rows]


VERL = [
    ("openai/gsm8k", "so #### 18", "18"),
    ("openai/gsm8k", "so #### 17", "18"),
    ("DigitalLearningGmbH/MATH-lighteval", r"thus \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    ("math_dapo", "Answer: 34", "34"),
    ("math_dapo", "Answer: 35", "34"),
    ("searchR1_nq", "<answer>Paris</answer>", {"target": ["Paris"]}),
]


def test_verls_own_package_judges_its_data_sources_as_it_does_there() -> None:
    there = pytest.importorskip(
        "verl.utils.reward_score", reason="verl is not installed"
    ).default_compute_score
    reward = find("verl:verl.utils.reward_score:default_compute_score")
    found = []
    for source, said, truth in VERL:
        row = {
            "data_source": source,
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {},
        }
        wanted = there(data_source=source, solution_str=said, ground_truth=truth, extra_info={})
        found.append(reward(completion=said, **row))
        assert found[-1] == (wanted["score"] if isinstance(wanted, dict) else wanted), source
    assert found == [1.0, 0.0, 1.0, 1.0, -1.0, 1.0]
    rows = scored(reward, chat=False)
    assert [(row["reward"], row[ERROR]) for row in rows] == [(0.0, None)] * 4
    with pytest.raises(NotImplementedError, match="data_source"):
        reward(
            completion="4", data_source="nowhere", reward_model={"ground_truth": "4"}, extra_info={}
        )


def test_verifiers_documented_functions_judge_alone_and_in_a_rubric(tmp_path: Path) -> None:
    page = functions(checkout("DATAFLOW_VERIFIERS_CHECKOUT"), "docs/legacy/environments.md")
    known = [
        each
        for each in page
        if is_of(each, "completion", "completions") and not is_of(each, "messages")
    ]
    assert len(known) >= 8, list(map(str, known))
    judged = 0
    for function in known:
        helpers = [
            each
            for each in function.arguments
            if each not in (*ROW, "completion", "completions", "prompt", "state")
        ]
        if helpers or "compute_similarity" in function.source:
            continue
        rows = scored(find(f"verifiers:{function.written(tmp_path)}"), chat=True)
        assert all(row[ERROR] is None for row in rows), (str(function), rows[0][ERROR])
        judged += 1
    assert judged >= 5
    made = {each.name: each.loaded() for each in known if each.name in WANTED}
    rubric = SimpleNamespace(
        funcs=[made[name] for name in WANTED], weights=list(WANTED.values()), parser=None
    )
    rows = scored(from_verifiers(rubric, note=True), chat=True)
    for row in rows:
        assert row[ERROR] is None
        parts = json.loads(row["reward_note"])
        said = [{"role": "assistant", "content": row["completion"]}]
        keywords = asyncio.run(
            made["check_keywords"](completion=said, info=json.loads(ROW["info"]))
        )
        assert parts["check_keywords"] == keywords
        assert parts["length_reward"] == asyncio.run(made["length_reward"](completion=said)) == 1.0
        assert (
            parts["diversity_bonus"]
            == asyncio.run(made["diversity_bonus"](completions=[said] * 2))[0]
            == 0.0
        )
        assert row["reward"] == pytest.approx(
            sum(WANTED[name] * value for name, value in parts.items())
        )


WANTED = {"check_keywords": 1.0, "length_reward": 0.1, "diversity_bonus": 1.0}


def _array(values: list[int]) -> Any:
    import numpy as np

    return np.array(values, np.int32)


def _mask(count: int) -> Any:
    import numpy as np

    return np.array([False, *[True] * count])
