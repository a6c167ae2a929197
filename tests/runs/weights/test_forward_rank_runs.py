"""Whole runs with forward operators of several ranks and replicas."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.forwards import plain_logprobs
from rigs.graphs import reward, words
from rigs.striking import Stopping, Striking

from dataflow import Graph, Model, Result, inline, join, run, scorer, verify
from dataflow.folder.faults import read_faults
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits, Patience
from dataflow.records import Array, version_column
from operators import Generator, Logprobs, Prompts, Trainer, Values
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


@scorer(per="group", isolate=False)
def credited(reward: Array, values: list[list[float]], ref_logprobs: list[list[float]]) -> Array:
    """What all columns have a part in."""
    first = np.array([next((value for value in row if value), 0.0) for row in values])
    nats = np.array([sum(row) for row in ref_logprobs])
    return np.asarray(reward - reward.mean() - 0.1 * first + 0.01 * (nats - nats.mean()))


def actor_loss(new_logprobs: Any, logprobs: Any, credited: Any) -> Any:
    return -credited * (new_logprobs - logprobs).exp()


def critic_loss(new_values: Any, reward: Any) -> Any:
    return (new_values - reward).square()


def actor_and_critic(policy: Path, parallel: int) -> Graph:
    """A reference that is refreshed with an average of the actor, and values that their critic
    feeds.
    """
    g, model = Graph("ranks"), Model(str(policy), name="actor")
    critic = Model(str(policy), head="value", name="critic")
    generator = Generator(model, group_size=4, max_tokens=8, slots=32)
    values, reference = (
        Values(critic, tensor_parallel=parallel),
        Logprobs(model.frozen(), tensor_parallel=parallel),
    )
    rollouts = generator(g.source(Prompts(words(), columns=("answer",))))
    rows = credited(reward(join(reference(rollouts), values(rollouts))))
    knobs: dict[str, Any] = {
        "prompts_per_step": 4,
        "lr": 1e-2,
        "eps": 1e-3,
        "normalize": "rollouts",
    }
    actor = Trainer(model, loss=actor_loss, name="actor", **knobs)
    learner = Trainer(critic, loss=critic_loss, name="learner", **knobs)
    actor(rows)
    learner(rows)
    g.feedback(actor.weights, generator, max_staleness=0)
    g.feedback(actor.weights.average(decay=0.5), reference, every=1)
    g.feedback(learner.weights, values, max_staleness=0)
    return g


@pytest.mark.slow
def test_ranks_that_are_fed_and_refreshed_give_the_numbers_of_one(
    policy: Path, tmp_path: Path, machine: None
) -> None:
    """From trainers of two ranks each, one of which sends to two replicas; tokens, columns and
    losses are alike.
    """
    torch.set_num_threads(1)
    many = run(
        actor_and_critic(policy, 2),
        steps=4,
        ranks={"actor": 2, "learner": 2},
        replicas={"ref_logprobs": 2},
        runs=tmp_path / "many",
        quiet=True,
    )
    one = run(actor_and_critic(policy, 1), steps=4, on=inline(), runs=tmp_path / "one", quiet=True)
    assert many.steps == one.steps == 4
    assert many.verdict.clean and one.verdict.clean, many.verdict.line
    for node in ("actor", "learner"):
        lines = [
            [line["loss"] for line in each.metrics if line.get("node") == node]
            for each in (many, one)
        ]
        assert len(lines[0]) == 4
        np.testing.assert_allclose(*lines, rtol=0, atol=1e-5)
    moved = set()
    for ours, theirs in zip(*map(trained, (many, one)), strict=True):
        assert (ours["group_id"], ours["tokens"]) == (theirs["group_id"], theirs["tokens"])
        for column in ("ref_logprobs", "values"):
            np.testing.assert_allclose(ours[column], theirs[column], rtol=0, atol=1e-5)
            assert ours[version_column(column)] == theirs[version_column(column)]
        moved.add((ours[version_column("ref_logprobs")], ours[version_column("values")]))
    assert moved == {(version, version) for version in range(4)}


def trained(result: Result) -> list[dict[str, Any]]:
    """Every row that the actor trained, in order."""
    rows = [
        row
        for step in range(1, result.steps + 1)
        for row in RunFolder.open(result.folder).rollouts_of("actor").read(step).to_pylist()
    ]
    return sorted(rows, key=lambda row: (row["group_id"], row["position"]))


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
