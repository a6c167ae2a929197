"""Evaluations of a run: several that are due at one step."""

import collections
from functools import partial
from pathlib import Path

import pytest

from dataflow import Graph, Model, inline, run, scorer
from dataflow.runs.opened import Run
from operators import Evaluate, Generator, Prompts, Trainer
from operators.credit import advantage
from operators.losses import aipo

pytestmark = pytest.mark.usefixtures("one_core")


@scorer(isolate=False)
def reward(completion: str) -> float:
    return float(completion[:1] in "abcdefghijklm")


def rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{chr(97 + n % 26)}{n}="} for n in range(count)]


def test_evaluations_that_are_due_at_one_step_each_keep_their_rows(policy: Path, tmp_path: Path) -> None:
    g, model = Graph("rounds"), Model(str(policy))
    generator = Generator(model, group_size=2, max_tokens=4, slots=16)
    trainer = Trainer(model, loss=partial(aipo, rho=4.0), prompts_per_step=4, lr=1e-3)
    trainer(advantage(reward(generator(g.source(Prompts(rows(40), epochs=None))))))

    for name, count in (("often", 6), ("seldom", 3)):
        held_out = Prompts(rows(count), name=f"{name}_asked", group_size=1)
        Evaluate(every_steps=1 if name == "often" else 2, name=name)(reward(generator(g.source(held_out))))
    g.feedback(trainer.weights, generator, max_staleness=0)
    result = run(g, on=inline(), steps=2, runs=tmp_path, quiet=True)
    assert result.verdict.clean, result.verdict.line
    found = {(line["node"], line["eval_n"]) for line in result.metrics if "eval_n" in line}
    assert found == {("often", 6), ("seldom", 3)}
    read = collections.Counter(row["node"] for row in Run(result.folder).rollouts().to_pylist())
    assert read["often"] == 6 * 3 and read["seldom"] == 3 * 2, "before the first step, and as each is due"
