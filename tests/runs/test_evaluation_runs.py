"""Evaluations of a run: several that are due at one step, and one that has the rows of several
sources.
"""

import collections
from functools import partial
from pathlib import Path

import pytest

from dataflow import Graph, Model, inline, run, scorer
from dataflow.folder.arrow_reading import read_arrow
from dataflow.folder.run_folder import RunFolder
from dataflow.history.rollout_view import find_rollout
from dataflow.live.rollouts import rollout_of
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


def test_evaluations_that_are_due_at_one_step_each_keep_their_rows(
    policy: Path, tmp_path: Path
) -> None:
    g, model = Graph("rounds"), Model(str(policy))
    generator = Generator(model, group_size=2, max_tokens=4, slots=16)
    trainer = Trainer(model, loss=partial(aipo, rho=4.0), prompts_per_step=4, lr=1e-3)
    trainer(advantage(reward(generator(g.source(Prompts(rows(40), epochs=None))))))

    for name, count in (("often", 6), ("seldom", 3)):
        held_out = Prompts(rows(count), name=f"{name}_asked", group_size=1)
        Evaluate(every_steps=1 if name == "often" else 2, name=name)(
            reward(generator(g.source(held_out)))
        )
    g.feedback(trainer.weights, generator, max_staleness=0)
    result = run(g, on=inline(), steps=2, runs=tmp_path, quiet=True)
    assert result.verdict.clean, result.verdict.line
    found = {(line["node"], line["eval_n"]) for line in result.metrics if "eval_n" in line}
    assert found == {("often", 6), ("seldom", 3)}
    read = collections.Counter(row["node"] for row in Run(result.folder).rollouts().to_pylist())
    assert read["often"] == 6 * 3 and read["seldom"] == 3 * 2, (
        "before the first step, and as each is due"
    )


def test_one_evaluation_of_two_sources_is_whole_though_their_groups_have_the_same_numbers(
    policy: Path, tmp_path: Path
) -> None:
    g, model = Graph("rounds"), Model(str(policy))
    generator = Generator(model, group_size=2, max_tokens=4, slots=16)
    trainer = Trainer(model, loss=partial(aipo, rho=4.0), prompts_per_step=4, lr=1e-3)
    trainer(advantage(reward(generator(g.source(Prompts(rows(40), epochs=None))))))

    evaluation = Evaluate(every_steps=1)
    leveled = [{**row, "level": at} for at, row in enumerate(rows(3))]
    for held_out in (
        Prompts(rows(5), name="easy", group_size=1),
        Prompts(leveled, name="hard", group_size=2, columns={"level": int}),
    ):
        evaluation(reward(generator(g.source(held_out))))
    g.feedback(trainer.weights, generator, max_staleness=0)
    result = run(g, on=inline(), steps=1, runs=tmp_path, quiet=True)
    assert result.verdict.clean, result.verdict.line
    assert [line["eval_n"] for line in result.metrics if "eval_n" in line] == [5 + 3 * 2] * 2

    table = Run(result.folder).rollouts(columns=["group_id", "source", "outcome", "level"])
    seen = [row for row in table.to_pylist() if row["outcome"] == "evaluated"]
    assert collections.Counter(row["source"] for row in seen) == {"easy": 5 * 2, "hard": 3 * 2 * 2}
    assert all((row["level"] is None) == (row["source"] == "easy") for row in seen)

    folder = RunFolder.open(result.folder)
    for source, ended in (("easy", 0), ("hard", 1)):
        found = find_rollout(folder, 2, source=source, group_id=2 - ended)
        assert (found.row["of_source"], [fate.step for fate in found.fates]) == (source, [0])
    groups = [
        rollout_of(read_arrow(folder.rollouts_of().evaluation_file(0)), row)["group_count"]
        for row in (0, 5)
    ]
    assert groups == [1, 2], "the group beside a rollout is of its source"
