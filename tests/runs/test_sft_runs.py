"""Supervised fine-tuning as a graph without feedback: demonstrations are what they should be, and
are learned.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from dataflow import (
    Devices,
    Graph,
    GraphError,
    Model,
    Result,
    collect,
    inline,
    plan,
    run,
    scorer,
    verify,
)
from dataflow.folder.run_folder import RunFolder
from dataflow.testing import FakePrompts
from operators import Evaluate, Generator, Prompts, Trainer
from operators.demonstrations import Demonstrations
from operators.losses import sft
from operators.rewards import exact

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]

TASKS = [
    {"prompt": f"{letter}=", "answer": f"{number}.{letter}"}
    for number, letter in enumerate("abcdefgh")
]
CHAT = (
    "{% for m in messages %}-{{ m.content }}.{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def sft_graph(
    policy: Path, *, epochs: int | None = None, prompts_per_step: int = 8, **trainer_knobs: Any
) -> Graph:
    g, model = Graph("sft"), Model(str(policy))
    knobs = {"prompts_per_step": prompts_per_step, "lr": 1e-2} | trainer_knobs
    trainer = Trainer(model, loss=sft, **knobs)
    source = Prompts(TASKS, columns=("answer",), epochs=epochs, shuffle_seed=0)
    trainer(Demonstrations(model)(g.source(source)))
    return g


@pytest.fixture(params=[pytest.param("processes", marks=pytest.mark.slow), "inline"])
def runs(request: pytest.FixtureRequest, tmp_path: Path, machine: None) -> Callable[..., Result]:
    on = inline() if request.param == "inline" else None
    return lambda graph, **how: run(graph, on=on, runs=tmp_path, quiet=True, **how)


def demonstrated(policy: Path, rows: list[dict[str, Any]], **knobs: Any) -> pa.Table:
    columns = [name for name in rows[0] if name != "prompt"]
    source = Prompts(rows, columns=columns, epochs=1, chat=knobs.get("chat", False))
    return collect(
        Demonstrations(Model(str(policy)), **knobs)(Graph("g").source(source)), rows=len(rows)
    )


# The rows


def test_a_demonstration_is_prompt_answer_and_end_token_with_the_mask_on_the_last_two(
    policy: Path,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policy)
    table = demonstrated(policy, TASKS)
    for row, task in zip(table.to_pylist(), TASKS, strict=True):
        assert row["tokens"] == [
            *tokenizer(task["prompt"] + task["answer"])["input_ids"],
            tokenizer.eos_token_id,
        ]
        assert row["mask"] == [False] * 2 + [True] * 4
        assert row["logprobs"] == [0.0] * 6 and row["versions"] == [-1] * 6
        assert (row["completion"], row["finish_reason"], row["error"]) == (
            task["answer"],
            "stop",
            None,
        )
        assert (row["rollout_id"], row["position"], row["group_size"]) == (row["group_id"], 0, 1)


def test_chat_messages_are_laid_out_as_a_generator_lays_them_out(
    policy: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policy)
    for file in policy.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path)
    rows = [{"prompt": "ab", "answer": "7"}]
    (row,) = demonstrated(tmp_path, rows, chat=True).to_pylist()
    assert tokenizer.decode(row["tokens"]) == f"-ab.=7{tokenizer.eos_token}"
    assert row["mask"] == [False] * 5 + [True] * 2
    generator = Generator(Model(str(tmp_path)), group_size=1, max_tokens=2, chat=True)
    made = collect(
        generator(Graph("g").source(Prompts(rows, columns=("answer",), chat=True))), rows=1
    ).to_pylist()[0]
    assert made["tokens"][:5] == row["tokens"][:5] and made["mask"][:6] == row["mask"][:6]


def test_another_column_may_hold_the_answer(policy: Path) -> None:
    table = demonstrated(policy, [{"prompt": "a=", "solution": "b"}], answer="solution")
    assert table.column("completion").to_pylist() == ["b"]


def test_what_cannot_be_a_demonstration_is_a_failed_row(policy: Path) -> None:
    rows = [
        {"prompt": "a=", "answer": "12345"},
        {"prompt": "a=", "answer": "1"},
        {"prompt": "abcdef=", "answer": "1"},
    ]
    table = demonstrated(policy, rows, context_tokens=5)
    errors = table.column("error").to_pylist()
    assert errors[1] is None
    said = (
        "demonstrations: too_long: the demonstration is too long: it has 8 tokens and the context"
        " has room for 5"
    )
    assert errors[0].startswith(said)
    assert errors[2].startswith("demonstrations: too_long: the prompt is too long")
    assert table.column("finish_reason").to_pylist() == ["error", "stop", "error"]


def test_a_demonstration_with_a_token_beyond_the_embeddings_is_a_failed_row(
    policy: Path, tmp_path: Path
) -> None:
    shutil.copytree(policy, tmp_path / "more")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "more")
    rows = [
        {"prompt": "a=", "answer": "<new>"},
        {"prompt": "<new>", "answer": "1"},
        {"prompt": "a=", "answer": "1"},
    ]
    errors = demonstrated(tmp_path / "more", rows).column("error").to_pylist()
    assert errors[2] is None and all("but the model knows" in error for error in errors[:2])


# The graph


def test_a_graph_without_feedback_is_checked_and_planned_with_no_reader_of_weights(
    policy: Path,
) -> None:
    graph = sft_graph(policy)
    graph.check()
    made = plan(graph, Devices(cpus=2))
    assert (made.weight_paths, made.bounds) == ((), {})
    assert made.placements["demonstrations"].worker == made.placements["prompts"].worker


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"answer": ""}, "has answer='', which names no column"),
        ({"context_tokens": 1}, "has context_tokens=1; give a whole number of 2 or more"),
        (
            {"answer": "solution"},
            "'demonstrations' reads column 'solution', but 'prompts' provides",
        ),
    ],
)
def test_demonstrations_that_cannot_be_are_refused(knobs: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Demonstrations(Model("m"), **knobs)(Graph("g").source(FakePrompts()))


# Whole runs


def test_demonstrations_are_learned_until_greedy_answers_are_right(
    policy: Path, runs: Callable[..., Result]
) -> None:
    result = runs(sft_graph(policy), steps=60)
    assert result.steps == 60
    assert result.verdict.clean and verify(result.folder).clean, result.verdict.line
    losses = [line["loss"] for line in result.metrics if "loss" in line]
    assert losses[0] > 2.5 and losses[-1] < 0.05
    last = RunFolder.open(result.folder).latest_checkpoint()
    greedy = Generator(Model(str(last)), group_size=1, max_tokens=8, temperature=0.0)
    source = Prompts(TASKS, columns=("answer",), epochs=1)
    table = collect(
        scorer(name="reward")(exact)(greedy(Graph("after").source(source))), rows=len(TASKS)
    )
    assert table.column("reward").to_pylist() == [1.0] * len(TASKS)
    assert set(table.column("finish_reason").to_pylist()) == {"stop"}


def test_a_run_without_steps_ends_with_its_prompts(
    policy: Path, runs: Callable[..., Result]
) -> None:
    result = runs(sft_graph(policy, epochs=3, prompts_per_step=5))
    assert result.steps == 4
    assert "24 groups issued = 20 trained + 4 dropped (4 too few for a step)" in result.verdict.line
    lines = [line for line in result.metrics if "loss" in line]
    assert not any("mismatch" in line or "kl" in line for line in lines), (
        "of tokens that no policy drew"
    )
    assert [(line["staleness_max"], line["by_staleness"]) for line in lines] == [(0, {})] * 4


@pytest.mark.slow
def test_what_is_learned_may_be_evaluated_on_prompts_of_its_own(
    policy: Path, tmp_path: Path, machine: None
) -> None:
    """The generator of the evaluation reads the weights; the demonstrations need none."""
    g, model = Graph("sft"), Model(str(policy))
    trainer = Trainer(model, loss=sft, prompts_per_step=8, lr=1e-2)
    trainer(Demonstrations(model)(g.source(Prompts(TASKS, columns=("answer",), epochs=50))))
    generator = Generator(model, group_size=1, max_tokens=8, temperature=0.0)
    held_out = g.source(Prompts(TASKS, columns=("answer",), name="held_out"))
    Evaluate(every_steps=25)(scorer(name="reward", isolate=False)(exact)(generator(held_out)))
    g.feedback(trainer.weights, generator, max_staleness=0)
    result = run(g, on=inline(), runs=tmp_path, quiet=True)
    assert (result.steps, result.verdict.clean) == (50, True), result.verdict.line
    assert result.evaluations[0] == (0, 0.0) and result.evaluations[-1] == (50, 1.0)
