"""Whole runs with forward operators of several ranks and replicas, which take their slices of trained weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.forwards import plain_logprobs
from rigs.graphs import reward, words

from dataflow import Graph, Model, join, run
from dataflow.folder.run_folder import RunFolder
from operators import Generator, Logprobs, Prompts, Trainer, Values
from operators.credit import advantage
from operators.models.loading import load_model

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]


def with_reference(new_logprobs: Any, logprobs: Any, ref_logprobs: Any, advantage: Any, kl: float = 0.05) -> Any:
    """A policy gradient with the KL to a reference in the loss."""
    ratio = ref_logprobs - new_logprobs
    return -(advantage * (new_logprobs - logprobs).exp()) + kl * (ratio.exp() - ratio - 1)


def to_reward(new_values: Any, reward: Any) -> Any:
    """What a critic learns."""
    return (new_values - reward).square()


def test_a_reference_and_values_of_several_ranks_take_their_slices_of_every_version(
    policy: Path, tmp_path: Path, machine: None
) -> None:
    """A refreshed reference on two ranks, and a critic's values as two replicas of two ranks."""
    torch.set_num_threads(1)
    g, model = Graph("ranks"), Model(str(policy), name="policy")
    critic = Model(str(policy), head="value", name="critic")
    generator = Generator(model, group_size=4, max_tokens=8, slots=32)
    reference, values = Logprobs(model.frozen(), tensor_parallel=2), Values(critic, tensor_parallel=2)
    knobs: dict[str, Any] = {"prompts_per_step": 4, "lr": 1e-2, "normalize": "rollouts", "checkpoint_every": 1}
    actor = Trainer(model, name="actor", loss=with_reference, **knobs)
    learner = Trainer(critic, name="learner", loss=to_reward, **knobs)
    rollouts = generator(g.source(Prompts(words(), columns=("answer",))))
    known = advantage(reward(join(reference(rollouts), values(rollouts))))
    actor(known)
    learner(known)
    g.feedback(actor.weights, generator, max_staleness=0)
    g.feedback(actor.weights, reference, every=2)
    g.feedback(learner.weights, values, max_staleness=0)
    result = run(g, steps=3, replicas={"values": 2}, runs=tmp_path / "runs", quiet=True)
    assert result.steps == 3 and result.verdict.clean, result.verdict.line
    folder = RunFolder.open(result.folder)
    for step in range(1, 4):
        at = {node: folder.latest_checkpoint(step - 1, node=node) for node in ("actor", "learner")} if step > 1 else {}
        expected = load_model(Model(str(at.get("learner") or policy), head="value"))
        first = load_model(Model(str(folder.latest_checkpoint(2, node="actor") if step == 3 else policy)))
        for row in folder.read_rollouts(step, node="actor").to_pylist():
            assert (row["ref_logprobs_version"], row["values_version"]) == (2 * (step == 3), step - 1)
            np.testing.assert_allclose(row["ref_logprobs"], plain_logprobs(first, row), atol=1e-4)
            numbers = expected(input_ids=torch.tensor([row["tokens"]])).logits[0, :, 0].tolist()
            wanted = [numbers[n - 1] if chosen else 0.0 for n, chosen in enumerate(row["mask"])]
            np.testing.assert_allclose(row["values"], wanted, atol=1e-4)
