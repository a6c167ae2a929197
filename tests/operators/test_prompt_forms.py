"""Rows as other systems lay them out, read as they are."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow import Graph, GraphError, collect, scorer
from dataflow.errors import RecordError
from dataflow.testing import FakeGenerator
from operators import Prompts
from operators.rewards import find

CHAT = [{"role": "user", "content": "2+2="}]
VERL = [
    {
        "data_source": "sums",
        "prompt": CHAT,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": index},
    }
    for index in range(3)
]


def issued(prompts: Prompts, rows: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = collect(Graph("g").source(prompts), rows=rows).to_pylist()
    return found


def test_verls_parquet_is_read_as_it_is_and_nested_columns_reach_scorers(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(VERL), file)
    prompts = Prompts(str(file), form="verl")
    assert prompts.chat
    assert list(prompts.extra_columns()) == ["data_source", "ability", "reward_model", "extra_info"]
    first = issued(prompts, 3)[0]
    assert json.loads(first["prompt"]) == CHAT
    assert {name: first[name] for name in VERL[0] if name != "prompt"} == {
        k: v for k, v in VERL[0].items() if k != "prompt"
    }

    @scorer
    def right(completion: str, reward_model: dict[str, str], extra_info: Any) -> float:
        return float(reward_model["ground_truth"] == "4") + extra_info["index"]

    rollouts = FakeGenerator(group_size=1)(
        Graph("g").source(Prompts(str(file), form="verl", epochs=1))
    )
    assert sorted(collect(right(rollouts), rows=3).column("right").to_pylist()) == [1.0, 2.0, 3.0]


def test_files_whose_nested_fields_differ_are_read_with_nulls(tmp_path: Path) -> None:
    """As verl and `datasets` take them."""
    for name, extra in (("a", {"index": 0}), ("b", {"index": 1, "hint": "h", "steps": [{"n": 1}]})):
        table = pa.Table.from_pylist([{**VERL[0], "extra_info": extra, "tests": [{name: 1}]}])
        pq.write_table(table, tmp_path / f"{name}.parquet")
    for source in (tmp_path, [tmp_path / "a.parquet", tmp_path / "b.parquet"]):
        rows = issued(Prompts(source, form="verl", columns=("tests",), epochs=1), 2)
        assert [row["extra_info"] for row in rows] == [
            {"index": 0, "hint": None, "steps": None},
            {"index": 1, "hint": "h", "steps": [{"n": 1}]},
        ]
        assert [row["tests"] for row in rows] == [[{"a": 1, "b": None}], [{"a": None, "b": 1}]]


def test_files_whose_nested_fields_contradict_are_refused(tmp_path: Path) -> None:
    for name, truth in (("a", "4"), ("b", 4)):
        table = pa.Table.from_pylist([{**VERL[0], "reward_model": {"ground_truth": truth}}])
        pq.write_table(table, tmp_path / f"{name}.parquet")
    with pytest.raises(GraphError, match=r"unlike values in 'reward_model'.*make them alike"):
        Graph("g").source(Prompts(tmp_path, form="verl"))


def test_a_verl_experiment_is_one_line_of_data_and_one_of_reward(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(VERL), tmp_path / "train.parquet")
    (tmp_path / "theirs.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(ground_truth == '4'), 'index': extra_info['index']}\n"
    )
    prompts = Prompts(str(tmp_path / "train.parquet"), form="verl", epochs=1)
    reward = find(f"verl:{tmp_path / 'theirs.py'}:compute_score")
    table = collect(reward(FakeGenerator(group_size=1)(Graph("g").source(prompts))), rows=3)
    assert (table.column("reward").to_pylist(), table.column("error").null_count) == ([1.0] * 3, 3)


@pytest.mark.parametrize(
    ("form", "rows", "prompt", "columns"),
    [
        (
            "trl",
            [{"prompt": "a", "solution": "b", "task": "c"}],
            "a",
            {"solution": "b", "task": "c"},
        ),
        ("trl", [{"prompt": "a", "completion": "not ours", "label": True}], "a", {"label": True}),
        (
            "verifiers",
            [{"question": "a", "answer": "b", "info": {"k": 1}}],
            '[{"role": "user", "content": "a"}]',
            {"answer": "b", "info": {"k": 1}},
        ),
        ("openrlhf", [{"input": "a", "label": "b", "other": 1}], "a", {"label": "b"}),
        (
            "slime",
            [{"prompt": "a", "label": "b", "metadata": {"k": "v"}}],
            "a",
            {"label": "b", "metadata": {"k": "v"}},
        ),
    ],
)
def test_the_rows_of_each_system_have_their_prompt_and_columns_found(
    form: str, rows: list[dict[str, Any]], prompt: str, columns: dict[str, Any]
) -> None:
    (row,) = issued(Prompts(rows, form=form), 1)
    assert row["prompt"] == prompt
    assert {name: row[name] for name in columns} == columns
    assert set(row) - set(columns) == {
        "group_id",
        "prompt_id",
        "prompt",
        "group_size",
        "min_version",
        "round_size",
    }


def test_what_a_row_of_a_form_lacks_is_null_and_a_scorer_that_reads_it_does_not_apply() -> None:
    rows = [
        {"prompt": "a", "solution": "1"},
        {"prompt": "b", "solution": None},
        {"prompt": "c", "tests": "x"},
    ]

    @scorer(isolate=False)
    def solved(completion: str, solution: str) -> float:
        return float(solution == "1")

    rollouts = FakeGenerator(group_size=1)(Graph("g").source(Prompts(rows, form="trl", epochs=1)))
    table = collect(solved(rollouts), rows=3).sort_by("group_id")
    assert table.column("solved").to_pylist() == [1.0, None, None]
    assert table.column("error").null_count == 3


def test_null_is_a_value_where_the_columns_type_says_so() -> None:
    rows = [{"prompt": "a", "hint": "h"}, {"prompt": "b", "hint": None}]
    assert [row["hint"] for row in issued(Prompts(rows, columns={"hint": str | None}), 2)] == [
        "h",
        None,
    ]
    with pytest.raises(RecordError, match="has null in 'hint'"):
        issued(Prompts(rows, columns={"hint": str}), 2)


def test_a_key_that_the_first_rows_did_not_have_is_refused_and_never_left_out() -> None:
    rows = [{"prompt": "a", "info": {"k": 1}}] * 60 + [{"prompt": "b", "info": {"k": 1, "new": 2}}]
    with pytest.raises(
        RecordError,
        match="where others have struct<k: int64>; make them alike, or write it as JSON",
    ):
        issued(Prompts(rows, columns=("info",)), 61)


def test_a_form_that_is_not_known_is_refused() -> None:
    with pytest.raises(GraphError, match="form='verll', which is not known; did you mean 'verl'"):
        Graph("g").source(Prompts(VERL, form="verll"))
