"""The page for those who come from other systems: each experiment on it runs, on rows and rewards
of that system.
"""

import ast
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rigs.policy import tiny_policy

from dataflow import Graph, inline, run, verify
from dataflow.app import all_flags
from dataflow.flags.declared import Declared, Flag
from dataflow.flags.words import unknown
from dataflow.folder.run_folder import RunFolder

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text("utf-8")
CHAT = [{"role": "user", "content": "2+2="}]
PARTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "TRL": (
        [{"prompt": f"{number}=", "answer": "a" if number % 2 else None} for number in range(4)],
        (
            "def accuracy(completions, answer, **kwargs):\n    return [None if end is None else"
            " float(end in text) for text, end in zip(completions, answer)]\nasync def"
            " format(prompts, completions, **kwargs):\n    return [float(len(text) % 2) for text in"
            " completions]\n"
        ),
    ),
    "verl": (
        [
            {
                "data_source": "sums",
                "prompt": CHAT,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "4"},
                "extra_info": {"index": number},
            }
            for number in range(4)
        ],
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n   "
            " return {'score': float(len(solution_str) % 2), 'right': ground_truth in"
            " solution_str}\n"
        ),
    ),
    "prime-rl": (
        [{"question": "2+2=", "answer": "4", "info": {"level": 1}} for _ in range(4)],
        (
            "from types import SimpleNamespace\n"
            "def exact(completion, answer, **kwargs):\n"
            "    return 1.0 if completion[-1]['content'].strip() == answer else 0.0\n"
            "async def odd(completion, info):\n"
            "    return float(len(completion[-1]['content']) % 2) * info['level']\n"
            "rubric = SimpleNamespace(funcs=[exact, odd], weights=[1.0, 0.5], parser=None)\n"
        ),
    ),
    "OpenRLHF": (
        [{"input": "2+2=", "label": "4"} for _ in range(4)],
        (
            "import numpy as np\n"
            "def reward_func(queries, prompts, labels, **kwargs):\n"
            "    reward = np.array([float(len(query) % 2) for query in queries])\n"
            "    return {'rewards': reward, 'scores': reward, 'extra_logs': {'dummy': reward}}\n"
        ),
    ),
}
"""By heading: rows, and the file of rewards."""


def builder(system: str) -> Callable[..., Graph]:
    """`build` of the code below a heading."""
    part = PAGE.split(f"\n## From {system}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
    scope: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, f"coming_from.md, {system}", "exec"), scope)
    made: Callable[..., Graph] = scope["build"]
    return made


@pytest.mark.parametrize("system", PARTS)
def test_the_experiment_of_another_system_runs_with_its_own_rows_and_rewards(
    system: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    rows, rewards = PARTS[system]
    policy = tiny_policy(tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(policy)
    (tmp_path / "my_rewards.py").write_text(rewards)
    file = tmp_path / ("rows.parquet" if system == "verl" else "rows.jsonl")
    if system == "verl":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    graph = builder(system)(
        policy=str(policy), prompts=str(file), rewards=str(tmp_path / "my_rewards.py")
    )
    result = run(graph, steps=2, on=inline(), runs=tmp_path / "runs", quiet=True)
    assert verify(result.folder).clean, verify(result.folder).line
    lines = [line for line in RunFolder.open(result.folder).read_metrics() if "loss" in line]
    assert len(lines) == 2
    assert all(line["failed"] == {} and line["reward_mean"] is not None for line in lines)
    if system == "TRL":
        assert all(line["does_not_apply"] == {"accuracy": 16} for line in lines)


def rows_of_flags() -> list[tuple[list[str], str]]:
    """Of the table of flags: the flags here, and each name elsewhere."""
    table = PAGE.split("\n## Flags by their names elsewhere\n")[1].split("\n## ")[0]
    cells = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    return [
        (re.findall(r"--[\w-]+", ours), name.strip("-"))
        for ours, *theirs, _ in cells
        for cell in theirs
        for name in re.findall(r"`([^`]+)`", cell)
    ]


def test_a_flag_of_another_system_is_refused_with_the_one_that_the_page_names() -> None:
    from graphs import aipo, dapo, grpo, ppo

    known: dict[str, Flag] = {}
    for module in (aipo, dapo, grpo, ppo):
        known |= all_flags(Declared.of(module.build), None)
    rows = rows_of_flags()
    assert len(rows) > 90 and all(
        flag[2:].replace("-", "_") in known for flags, _ in rows for flag in flags
    )
    for flags, name in rows:
        told = unknown(name, known, "graphs.aipo", name)
        assert name in known or any(re.search(rf"{flag}\b(?!-)", told) for flag in flags), told


def test_the_names_of_trl_on_the_page_are_those_of_its_configs() -> None:
    if (spec := importlib.util.find_spec("trl")) is None or spec.origin is None:
        pytest.skip("trl is not installed; pip install dataflow-rl[bench]")
    trl, transformers = (
        Path(spec.origin).parent,
        Path(str(importlib.util.find_spec("transformers").origin)).parent,
    )
    configs = (
        "trainer/grpo_config.py",
        "trainer/base_config.py",
        "trainer/model_config.py",
        "scripts/utils.py",
    )
    fields = {"chat_template"}  # of the tokenizer
    for file in (
        *(trl / config for config in configs),
        trl / "trainer/grpo_trainer.py",
        transformers / "training_args.py",
    ):
        # to import them takes all that they may use
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            match node:
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.arg(arg=name):
                    fields.add(name)
    table = PAGE.split("\n## Flags by their names elsewhere\n")[1].split("\n## ")[0]
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(named) > 30 and not {*named} - fields


def test_every_form_of_the_page_is_there() -> None:
    import operators.rewards  # noqa: F401
    from dataflow.scorer import FORMS
    from operators.prompts import DATA_FORMS

    assert set(FORMS) == set(re.findall(r"^\| `(\w+):` \|", PAGE, re.MULTILINE))
    assert all(f"`{form}`" in PAGE for form in DATA_FORMS)
    (code,) = re.findall(r"```python\n(from operators.rewards import Judge.*?)```", PAGE, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert sorted(scope["graded"].scorer.reads()) == ["completion", "prompt"]
