"""Whole runs with forward operators of several ranks and replicas."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.forwards import plain_logprobs
from rigs.graphs import reward, words

from dataflow import Graph, Model, run
from dataflow.folder.run_folder import RunFolder
from operators import Generator, Logprobs, Prompts, Trainer
from operators.credit import advantage
from operators.models.loading import load_model

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]


def with_reference(new_logprobs: Any, logprobs: Any, ref_logprobs: Any, advantage: Any, kl: float = 0.05) -> Any:
    """A policy gradient with the KL to a reference in the loss."""
    ratio = ref_logprobs - new_logprobs
    return -(advantage * (new_logprobs - logprobs).exp()) + kl * (ratio.exp() - ratio - 1)


def test_a_frozen_reference_may_have_two_replicas_of_two_ranks(policy: Path, tmp_path: Path, machine: None) -> None:
    torch.set_num_threads(1)
    g, model = Graph("ranks"), Model(str(policy), name="policy")
    generator = Generator(model, group_size=4, max_tokens=8, slots=32)
    reference = Logprobs(model.frozen(), tensor_parallel=2)
    trainer = Trainer(model, loss=with_reference, prompts_per_step=4, lr=1e-2, normalize="rollouts")
    trainer(advantage(reward(reference(generator(g.source(Prompts(words(), columns=("answer",))))))))
    g.feedback(trainer.weights, generator, max_staleness=0)
    result = run(g, steps=2, replicas={"ref_logprobs": 2}, runs=tmp_path / "runs", quiet=True)
    assert result.steps == 2 and result.verdict.clean, result.verdict.line
    first = load_model(model)
    for step in (1, 2):
        for row in RunFolder.open(result.folder).read_rollouts(step).to_pylist():
            np.testing.assert_allclose(row["ref_logprobs"], plain_logprobs(first, row), atol=1e-4)
