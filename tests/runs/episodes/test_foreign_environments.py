"""Environments of TRL and verifiers as their documentation has them, unchanged, in runs that train a small policy.

DATAFLOW_TRL_CHECKOUT, DATAFLOW_VERIFIERS_CHECKOUT    folders of the projects' repositories, whose pages are read
DATAFLOW_VERIFIERS_PYTHON                             an interpreter that has verifiers
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from documents_rig import checkout, class_block

from bench.episodes.tool_caller import make
from dataflow import Graph, Model, Result, run
from dataflow.folder.run_folder import RunFolder
from operators import Generator, Prompts, Trainer
from operators.credit import advantage
from operators.environments import trl_environment
from operators.losses import aipo
from operators.naming import named

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(400)]
STEPS = 2


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that calls `increment` with a number from 1 to 6."""
    folder = tmp_path_factory.mktemp("policies") / "counter"
    make(folder, tool="increment", argument="step", value=lambda rng: str(rng.randint(1, 6)))
    return folder


def trained(policy: Path, world: Any, prompts: Prompts, runs: Path, *, chat: bool = True) -> tuple[Result, pa.Table]:
    g, model = Graph("foreign"), Model(str(policy))
    generator = Generator(model, group_size=4, max_tokens=24, slots=16, chat=chat)
    trainer = Trainer(model, loss=partial(aipo, rho=4.0), prompts_per_step=2, lr=1e-4, normalize="rollouts")
    trainer(advantage(world(generator, g.source(prompts))))
    g.feedback(trainer.weights, generator, max_staleness=1)
    result = run(g, steps=STEPS, runs=runs, quiet=True)
    assert result.verdict.clean, result.verdict.line
    files = RunFolder.open(result.folder).rollouts_of()
    rows = pa.concat_tables([files.read(step) for step in range(1, result.steps + 1)])
    assert set(rows.column("error").to_pylist()) == {None}
    return result, rows


def messages(text: str) -> str:
    return json.dumps([{"role": "user", "content": text}])


def heard(row: dict[str, Any]) -> list[str]:
    """Results of tools in a completion."""
    parts: list[str] = row["completion"].split("tool\n")[1:]
    return [part.split("\n")[0].split("<")[0] for part in parts]


def documented(tmp_path: Path, variable: str, page: str, name: str, more: str = "") -> Path:
    file = tmp_path / f"{name.lower()}_v1.py"
    file.write_text(class_block(checkout(variable) / page, name) + more)
    return file


def test_trls_documented_environment_is_trained_in(counter: Path, tmp_path: Path) -> None:
    """It draws its own task, and `reset` returns the prompt."""
    file = documented(tmp_path, "DATAFLOW_TRL_CHECKOUT", "docs/source/grpo_trainer.md", "IncrementEnv")
    world = trl_environment(named(f"{file}:IncrementEnv", "IncrementEnv", "environment"), rounds=2)
    _, rows = trained(counter, world, Prompts([{"prompt": messages("")}] * 8), tmp_path)
    for row in rows.to_pylist():
        turns, mask = np.array(row["turn"]), np.array(row["mask"])
        assert row["reward"] in (0.0, 1.0) and max(turns) == 2 and (mask == (turns >= 0)).all()
        assert "Increment the counter by" not in row["completion"]
