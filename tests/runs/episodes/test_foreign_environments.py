"""Environments of TRL and verifiers as their documentation has them, unchanged, in runs that train
a small policy.

DATAFLOW_TRL_CHECKOUT, DATAFLOW_VERIFIERS_CHECKOUT    folders of the projects' repositories, whose
                                                      pages are read
DATAFLOW_VERIFIERS_PYTHON                             an interpreter that has verifiers
"""

import json
import os
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
from dataflow.system.modules import named
from operators import Generator, Prompts, Trainer
from operators.credit import advantage
from operators.environments import (
    trl_environment,
    trl_environments,
    trl_rollout,
    verifiers_environment,
)
from operators.losses import aipo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("forked", "one_core"),
    pytest.mark.timeout(400),
]


STEPS = 2


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that calls `increment` with a number from 1 to 6."""
    folder = tmp_path_factory.mktemp("policies") / "counter"
    make(folder, tool="increment", argument="step", value=lambda rng: str(rng.randint(1, 6)))
    return folder


def trained(
    policy: Path, world: Any, prompts: Prompts, runs: Path, *, chat: bool = True
) -> tuple[Result, pa.Table]:
    g, model = Graph("foreign"), Model(str(policy))
    generator = Generator(model, group_size=4, max_tokens=24, slots=16, chat=chat)
    trainer = Trainer(
        model, loss=partial(aipo, rho=4.0), prompts_per_step=2, lr=1e-4, normalize="rollouts"
    )
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
    file = documented(
        tmp_path, "DATAFLOW_TRL_CHECKOUT", "docs/source/grpo_trainer.md", "IncrementEnv"
    )
    world = trl_environment(named(f"{file}:IncrementEnv", "IncrementEnv", "environment"), rounds=2)
    _, rows = trained(
        counter, world, Prompts([{"prompt": json.loads(messages(""))}] * 8, chat=True), tmp_path
    )
    for row in rows.to_pylist():
        turns, mask = np.array(row["turn"]), np.array(row["mask"])
        assert row["reward"] in (0.0, 1.0) and max(turns) <= 2 and (mask == (turns >= 0)).all()
        assert "Increment the counter by" not in row["completion"]
    assert max(max(turns) for turns in rows.column("turn").to_pylist()) == 2


def test_a_dictionary_of_environments_shows_each_row_its_own_tools(
    counter: Path, tmp_path: Path
) -> None:
    file = documented(
        tmp_path,
        "DATAFLOW_TRL_CHECKOUT",
        "docs/source/grpo_trainer.md",
        "IncrementEnv",
        "\n\nclass Other:\n    def reset(self, **kwargs):\n        self.said = 0\n\n    async def"
        " get_reward(self):\n        return 10.0 + self.said\n\n    async def say(self, word: str)"
        ' -> str:\n        """Says it.\n\n        Args:\n            word: Any.\n        """\n     '
        '   self.said += 1\n        return word\n\n\nWORLDS = {"count": IncrementEnv, "talk":'
        " Other}\n",
    )
    rows = [{"prompt": messages("a="), "environment": name} for name in ("count", "talk")] * 4
    world = trl_environments(f"{file}:WORLDS", rounds=2, concurrency=4, timeout_s=60.0)
    _, found = trained(counter, world, Prompts(rows, columns=("environment",)), tmp_path)
    for row in found.to_pylist():
        if row["environment"] == "count":
            assert row["reward"] in (0.0, 1.0)
        else:
            assert row["reward"] == 10.0 and "Tool increment not found." in row["completion"]


ROLLOUT = """
def rollout(prompts, trainer):
    tokenizer = trainer.processing_class
    begin = "<|im_start|>user\\n" + prompts[0] + "<|im_end|>\\n<|im_start|>assistant\\n"
    prompt_ids = tokenizer(begin)["input_ids"]
    generate = trainer.vllm_generation.generate
    _, first, first_logprobs, _ = generate(prompts=[prompt_ids], images=None, num_generations=1)
    heard = tokenizer("\\n<|im_start|>tool\\n=<|im_end|>\\n<|im_start|>assistant\\n")["input_ids"]
    again = [prompt_ids + first[0] + heard]
    _, second, second_logprobs, _ = generate(prompts=again, images=None, num_generations=1)
    logprobs = [*first_logprobs[0], *[[0.0]] * len(heard), *second_logprobs[0]]
    mask = [1] * len(first[0]) + [0] * len(heard) + [1] * len(second[0])
    return {
        "prompt_ids": [prompt_ids], "completion_ids": [first[0] + heard + second[0]],
        "logprobs": [[each[0] for each in logprobs]], "env_mask": [mask],
        "env_reward": [float(len(heard))],
    }


def lying(prompts, trainer):
    told = rollout(prompts, trainer)
    return {**told, "completion_ids": [[1] * len(told["completion_ids"][0])]}
"""


def test_a_rollout_func_gets_a_trainer_that_generates_turns_of_the_policy(
    counter: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ROLLOUT)
    world = trl_rollout(
        f"{file}:rollout", tokenizer=str(counter), gives="env_reward", max_tokens=16, concurrency=4
    )
    _, rows = trained(counter, world, Prompts([{"prompt": "a="}] * 8), tmp_path, chat=False)
    for row in rows.to_pylist():
        turns, mask = np.array(row["turn"]), np.array(row["mask"])
        assert max(turns) == 1 and row["reward"] == float((~mask[np.flatnonzero(mask)[0] :]).sum())


@pytest.mark.parametrize("client", ["eval", "train"])
def test_a_documented_taskset_of_verifiers_is_played_through_its_own_server(
    counter: Path, tmp_path: Path, client: Any
) -> None:
    """Its loop calls the endpoint of the run: OpenAI's API, or the token route with prompts that it
    lays out itself.
    """
    python = os.environ.get("DATAFLOW_VERIFIERS_PYTHON")
    if not python:
        pytest.skip("DATAFLOW_VERIFIERS_PYTHON names no interpreter that has verifiers")
    page = "docs/v1/tasksets.md"
    documented(
        tmp_path,
        "DATAFLOW_VERIFIERS_CHECKOUT",
        page,
        "AdditionTaskset",
        '\n\n__all__ = ["AdditionTaskset"]\n',
    )
    world = verifiers_environment(
        "additiontaskset-v1",
        python=python,
        path=[str(tmp_path)],
        client=client,
        tokenizer=str(counter),
        concurrency=2,
    )
    _, rows = trained(counter, world, world.tasks(8), tmp_path)
    for row in rows.to_pylist():
        assert (
            row["reward"] == 0.0
            and "increment" in row["completion"]
            and row["finish_reason"] == "stop"
        )
        assert json.loads(row["prompt"])[0]["content"].startswith("What is")
