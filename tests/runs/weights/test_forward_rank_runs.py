"""Whole runs with forward operators of several ranks and replicas."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.forwards import plain_logprobs
from rigs.graphs import reward, words
from rigs.striking import Stopping, Striking

from dataflow import Graph, Model, run, verify
from dataflow.folder.faults import read_faults
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits, Patience
from dataflow.records import version_column
from operators import Generator, Logprobs, Prompts, Trainer
from operators.credit import advantage
from operators.models.loading import load_model

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]


def with_reference(
    new_logprobs: Any, logprobs: Any, ref_logprobs: Any, advantage: Any, kl: float = 0.05
) -> Any:
    """A policy gradient with the KL to a reference in the loss."""
    ratio = ref_logprobs - new_logprobs
    return -(advantage * (new_logprobs - logprobs).exp()) + kl * (ratio.exp() - ratio - 1)


@pytest.mark.slow
def test_a_frozen_reference_may_have_two_replicas_of_two_ranks(
    policy: Path, tmp_path: Path, machine: None
) -> None:
    torch.set_num_threads(1)
    g, model = Graph("ranks"), Model(str(policy), name="policy")
    generator = Generator(model, group_size=4, max_tokens=8, slots=32)
    reference = Logprobs(model.frozen(), tensor_parallel=2)
    trainer = Trainer(model, loss=with_reference, prompts_per_step=4, lr=1e-2, normalize="rollouts")
    trainer(
        advantage(reward(reference(generator(g.source(Prompts(words(), columns=("answer",)))))))
    )
    g.feedback(trainer.weights, generator, max_staleness=0)
    result = run(g, steps=2, replicas={"ref_logprobs": 2}, runs=tmp_path / "runs", quiet=True)
    assert result.steps == 2 and result.verdict.clean, result.verdict.line
    first = load_model(model)
    for step in (1, 2):
        for row in RunFolder.open(result.folder).rollouts_of().read(step).to_pylist():
            np.testing.assert_allclose(row["ref_logprobs"], plain_logprobs(first, row), atol=1e-4)


def refreshed(policy: Path) -> Graph:
    """A reference of two ranks that is refreshed with every second version."""
    g, model = Graph("struck"), Model(str(policy), name="policy")
    generator = Generator(model, group_size=4, max_tokens=8, slots=32)
    reference = Logprobs(model.frozen(), tensor_parallel=2)
    knobs: dict[str, Any] = {
        "prompts_per_step": 2,
        "lr": 1e-2,
        "normalize": "rollouts",
        "checkpoint_every": 1,
    }
    trainer = Trainer(model, loss=with_reference, **knobs)
    trainer(
        advantage(reward(reference(generator(g.source(Prompts(words(), columns=("answer",)))))))
    )
    g.feedback(trainer.weights, generator, max_staleness=0)
    g.feedback(trainer.weights, reference, every=2)
    return g


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "weights"), [("killed", "shared_memory"), ("killed", "gloo"), ("stopped", "gloo")]
)
def test_a_rank_of_a_refreshed_reference_that_is_struck_ends_no_run(
    how: str, weights: str, policy: Path, tmp_path: Path, machine: None
) -> None:
    """What is read afterwards is read with the version that belongs to it."""
    torch.set_num_threads(1)
    steps, limits = 16, Limits(exchange_s=5.0, patience=Patience(first_s=0.05, of_one=5))
    sizes, victims = {"ref_logprobs": 2}, [("ref_logprobs", 1), ("ref_logprobs", 0)]
    striking = (
        Striking(tmp_path, sizes, victims)
        if how == "killed"
        else Stopping(tmp_path, sizes, victims[:1], 20.0)
    )
    striking.start()
    result = run(
        refreshed(policy),
        steps=steps,
        ranks={"trainer": 2},
        weights=weights,
        runs=tmp_path,
        limits=limits,
        quiet=True,
    )
    striking.join(10)
    assert striking.error is None and not striking.is_alive(), (striking.error, striking.struck)
    assert result.steps == steps and result.verdict.clean and verify(result.folder).clean, (
        result.verdict.line
    )
    found = read_faults(result.folder)
    assert {fault["worker"] for fault in found} <= {"ref_logprobs-0"}
    # a stop while its trainer waits for it is sat out
    assert how == "stopped" or len(found) >= len(striking.struck)
    folder = RunFolder.open(result.folder)
    for step in range(1, steps + 1):
        version = (step - 1) // 2 * 2
        module = load_model(Model(str(folder.latest_checkpoint(version) if version else policy)))
        for row in folder.rollouts_of().read(step).to_pylist():
            assert row[version_column("ref_logprobs")] == version
            np.testing.assert_allclose(
                row["ref_logprobs"], plain_logprobs(module, row), rtol=0, atol=1e-4
            )
