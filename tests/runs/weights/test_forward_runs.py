"""Whole runs with forward operators: a reference, a proximal policy, a judge, a critic, beside what
they serve.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from rigs.forwards import plain_logprobs, saved
from rigs.graphs import reward, words
from rigs.heads import classifier

from dataflow import Graph, Model, Result, inline, join, run, scorer
from dataflow.folder.run_folder import RunFolder
from dataflow.records import Array
from operators import Generator, Logprobs, Prompts, RewardModel, Trainer, Values
from operators.credit import advantage
from operators.models.loading import load_model

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]

STEPS = 3
Runner = Callable[..., Result]


@pytest.fixture(params=["inline", pytest.param("processes", marks=pytest.mark.slow)])
def runs(request: pytest.FixtureRequest, tmp_path: Path, machine: None) -> Runner:
    torch.set_num_threads(1)

    def runner(graph: Graph, **how: Any) -> Result:
        on = inline() if request.param == "inline" else None
        return run(graph, steps=STEPS, on=on, runs=tmp_path / "runs", quiet=True, **how)

    return runner


def with_reference(
    new_logprobs: Any, logprobs: Any, ref_logprobs: Any, advantage: Any, kl: float = 0.05
) -> Any:
    """A policy gradient with the KL to a reference in the loss."""
    ratio = ref_logprobs - new_logprobs
    return -(advantage * (new_logprobs - logprobs).exp()) + kl * (ratio.exp() - ratio - 1)


def decoupled(new_logprobs: Any, logprobs: Any, proximal_logprobs: Any, advantage: Any) -> Any:
    """Ratios against the proximal policy, weighted by how far that is from the generator's."""
    weight = (proximal_logprobs - logprobs).exp()
    return -weight * advantage * (new_logprobs - proximal_logprobs).exp()


def start(policy: Path, **knobs: Any) -> tuple[Graph, Model, Generator, Any]:
    g, model = Graph("forwards"), Model(str(policy), name="policy")
    generator = Generator(
        model, **{"group_size": 4, "max_tokens": 12, "segment_tokens": 4, "slots": 32, **knobs}
    )
    return g, model, generator, generator(g.source(Prompts(words(), columns=("answer",))))


def trainer_of(model: Model, loss: Any, **knobs: Any) -> Trainer:
    return Trainer(
        model, loss=loss, **{"prompts_per_step": 4, "lr": 1e-2, "normalize": "rollouts", **knobs}
    )


def rows(result: Result, node: str | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every row that a trainer trained, with its step."""
    for step in range(1, result.steps + 1):
        table: pa.Table = RunFolder.open(result.folder).rollouts_of(node).read(step)
        yield from ((step, row) for row in table.to_pylist())


def test_a_reference_stays_while_the_policy_learns(runs: Runner, policy: Path) -> None:
    g, model, generator, rollouts = start(policy)
    reference, trainer = Logprobs(model.frozen()), trainer_of(model, with_reference)
    trainer(advantage(reward(reference(rollouts))))
    g.feedback(trainer.weights, generator, max_staleness=1)
    result = runs(g)
    assert result.steps == STEPS and result.verdict.clean, result.verdict.line
    first = load_model(model)
    versions = set()
    for _, row in rows(result):
        np.testing.assert_allclose(row["ref_logprobs"], plain_logprobs(first, row), atol=1e-4)
        if set(row["versions"]) <= {-1, 0}:
            np.testing.assert_allclose(row["ref_logprobs"], row["logprobs"], atol=1e-4)
        versions |= set(row["versions"])
    assert max(versions) > 0
    told = [line["kl_reference"] for line in result.metrics if "kl_reference" in line]
    assert told[0] == pytest.approx(0, abs=1e-5) and told[-1] > 1e-5


@pytest.mark.slow
def test_a_reference_may_run_as_two_replicas(policy: Path, tmp_path: Path, machine: None) -> None:
    g, model, generator, rollouts = start(policy)
    reference, trainer = Logprobs(model.frozen()), trainer_of(model, with_reference)
    trainer(advantage(reward(reference(rollouts))))
    g.feedback(trainer.weights, generator, max_staleness=1)
    result = run(g, steps=STEPS, replicas={"ref_logprobs": 2}, runs=tmp_path, quiet=True)
    assert result.steps == STEPS and result.verdict.clean, result.verdict.line
    first = load_model(model)
    for _, row in rows(result):
        np.testing.assert_allclose(row["ref_logprobs"], plain_logprobs(first, row), atol=1e-4)
    assert {"ref_logprobs-0.log", "ref_logprobs-1.log"} <= {
        path.name for path in RunFolder.open(result.folder).logs.iterdir()
    }


@pytest.mark.slow
def test_a_proximal_policy_without_staleness_is_the_one_that_generated(
    runs: Runner, policy: Path
) -> None:
    """In a synchronous run all tokens of a step come from one version, and so do their proximal
    log-probabilities.
    """
    g, model, generator, rollouts = start(policy)
    proximal, trainer = Logprobs(model, name="proximal_logprobs"), trainer_of(model, decoupled)
    trainer(advantage(reward(proximal(rollouts))))
    for reader in (generator, proximal):
        g.feedback(trainer.weights, reader, max_staleness=0)
    result = runs(g)
    assert result.steps == STEPS and result.verdict.clean, result.verdict.line
    for step, row in rows(result):
        assert set(row["versions"]) == {-1, step - 1}
        np.testing.assert_allclose(row["proximal_logprobs"], row["logprobs"], atol=1e-4)


@scorer(isolate=False)
def judged(score: float, completion: str) -> float:
    return score + 0.0 * len(completion)


@scorer(per="group", isolate=False)
def shaped(judged: Array, values: list[list[float]], ref_logprobs: list[list[float]]) -> Array:
    first = np.array([next((value for value in row if value), 0.0) for row in values])
    return np.asarray(judged - judged.mean() - 0.0 * first)


def actor_loss(new_logprobs: Any, logprobs: Any, shaped: Any) -> Any:
    return -shaped * (new_logprobs - logprobs).exp()


def critic_loss(new_values: Any, judged: Any) -> Any:
    return (new_values - judged).square()


def ppo(
    policy: Path,
    judge: Path,
    max_staleness: int = 0,
    critic_step: int = 4,
    critic_loss: Any = critic_loss,
) -> Graph:
    g, model, generator, rollouts = start(policy)
    critic = Model(str(policy), head="value", name="critic")
    values = Values(critic)
    score = RewardModel(Model(str(judge), head="score").frozen())
    joined = join(Logprobs(model.frozen())(rollouts), values(rollouts), score(rollouts))
    credited = shaped(judged(joined))
    actor = trainer_of(model, actor_loss, name="actor")
    learner = trainer_of(
        critic, critic_loss, name="learner", prompts_per_step=critic_step, checkpoint_every=1
    )
    actor(credited)
    learner(credited)
    g.feedback(actor.weights, generator, max_staleness=max_staleness)
    g.feedback(learner.weights, values, max_staleness=0)
    return g


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(classifier("Llama", "SequenceClassification"), tmp_path_factory.mktemp("judge"))


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_actor_and_critic_learn_side_by_side_from_a_reference_a_judge_and_values(
    runs: Runner, policy: Path, judge: Path, max_staleness: int
) -> None:
    """Values begin at 0 and move with the critic: those of a group come from a critic no older than
    its tokens.
    """
    result = runs(ppo(policy, judge, max_staleness))
    assert result.verdict.clean, result.verdict.line
    folder = RunFolder.open(result.folder)
    critics = [Model(str(policy), head="value")]
    for step in range(1, STEPS):
        critics.append(Model(str(folder.latest_checkpoint(step, node="learner")), head="value"))
    modules = [load_model(critic) for critic in critics]
    for step, row in rows(result, "actor"):
        newest = max(row["versions"])
        own = [values_of(module, row) for module in modules]
        near = [
            version
            for version, values in enumerate(own)
            if np.allclose(values, row["values"], atol=1e-4)
        ]
        assert near and max(near) >= newest, (step, newest, near)
        if max_staleness == 0:
            assert near == [newest] == [step - 1]


def values_of(module: Any, row: dict[str, Any]) -> list[float]:
    numbers = module(input_ids=torch.tensor([row["tokens"]])).logits[0, :, 0].tolist()
    return [numbers[at - 1] if chosen else 0.0 for at, chosen in enumerate(row["mask"])]


@pytest.mark.slow
def test_a_critic_that_skips_a_step_which_the_policy_made_holds_nobody_up(
    policy: Path, judge: Path, tmp_path: Path
) -> None:
    """It is a version behind from then on, which is as new as it can be."""
    calls = 0

    def skipping(new_values: Any, judged: Any) -> Any:
        nonlocal calls
        calls += 1
        return (new_values - judged).square() * (float("nan") if calls == 2 else 1.0)

    result = run(
        ppo(policy, judge, critic_loss=skipping), steps=4, on=inline(), runs=tmp_path, quiet=True
    )
    assert result.steps == 4 and result.verdict.clean, result.verdict.line
    dropped = [line["dropped"] for line in result.metrics if line.get("node") == "learner"]
    assert {"non-finite": 4} in dropped


@pytest.mark.slow
def test_a_critic_may_make_more_steps_than_the_policy(
    policy: Path, judge: Path, tmp_path: Path
) -> None:
    """Twice as many, of half as many groups: the values of version 1 are those of the critic's
    second.
    """
    g = ppo(policy, judge, critic_step=2)
    result = run(g, steps=STEPS, on=inline(), runs=tmp_path, quiet=True)
    assert result.verdict.clean, result.verdict.line
    folder = RunFolder.open(result.folder)
    last = {step: folder.latest_checkpoint(step, node="learner") for step in range(1, STEPS + 1)}
    for step, row in rows(result, "actor"):
        needed = min(2 * (step - 1), STEPS)
        critic = load_model(Model(str(last.get(needed) or policy), head="value"))
        np.testing.assert_allclose(row["values"], values_of(critic, row), atol=1e-4)
