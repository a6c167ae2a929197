"""Whole runs in which a reference is refreshed: with every n-th version, or with a moving
average.
"""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.forwards import plain_logprobs, saved
from rigs.graphs import reward, words
from rigs.operators import struck

from dataflow import Graph, LoRA, Model, Result, inline, run
from dataflow.folder.run_folder import RunFolder
from dataflow.history.launch import Wishes
from dataflow.history.replay import replay
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


def refreshed(
    policy: Path,
    *,
    every: int,
    decay: float = 0.0,
    max_staleness: int = 0,
    own: Model | None = None,
    around: Mapping[str, Callable[[Any], Any]] | None = None,
    **knobs: Any,
) -> Graph:
    """A tiny run whose reference is refreshed; own: the model that it begins with. around: by
    operator.
    """
    g, model = Graph("refreshed"), Model(str(policy), name="policy")
    generator = Generator(model, group_size=4, max_tokens=12, segment_tokens=4, slots=32)
    wrap = {"reference": lambda it: it, "trainer": lambda it: it} | dict(around or {})
    reference = wrap["reference"](Logprobs(own or model.frozen()))
    trainer = wrap["trainer"](
        Trainer(
            model,
            loss=with_reference,
            prompts_per_step=4,
            lr=1e-2,
            normalize="rollouts",
            **{"checkpoint_every": 1, **knobs},
        )
    )
    rollouts = generator(g.source(Prompts(words(), columns=("answer",))))
    trainer(advantage(reward(reference(rollouts))))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    g.feedback(trainer.weights.average(decay=decay), reference, every=every)
    return g


def rows_of(result: Result, step: int) -> list[dict[str, Any]]:
    return RunFolder.open(result.folder).rollouts_of().read(step).to_pylist()


def weights_of(result: Result, policy: Path, step: int) -> Any:
    """The model after so many steps."""
    folder = RunFolder.open(result.folder).latest_checkpoint(step) if step else policy
    return load_model(Model(str(folder)))


def averaged(result: Result, policy: Path, step: int, decay: float) -> Any:
    """The model of a moving average, in float64, by the definition of one."""
    module = weights_of(result, policy, 0)
    average = {name: weight.double() for name, weight in module.named_parameters()}
    for at in range(1, step + 1):
        newer = dict(weights_of(result, policy, at).named_parameters())
        average = {
            name: decay * old + (1 - decay) * newer[name].double() for name, old in average.items()
        }
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(average[name])
    return module


def check_rows(result: Result, modules: Mapping[int, Any], every: int) -> None:
    """Rows of steps in (k * every, (k + 1) * every] were read with version k * every, and say
    so.
    """
    for step in range(1, result.steps + 1):
        version = (step - 1) // every * every
        for row in rows_of(result, step):
            assert row[version_column("ref_logprobs")] == version, step
            np.testing.assert_allclose(
                row["ref_logprobs"], plain_logprobs(modules[version], row), atol=1e-4
            )


@pytest.mark.parametrize("on", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
def test_steps_are_read_with_the_weights_of_the_last_nth_step(
    on: str, policy: Path, tmp_path: Path, machine: None
) -> None:
    torch.set_num_threads(1)
    where = inline() if on == "inline" else None
    result = run(refreshed(policy, every=2), steps=5, on=where, runs=tmp_path / "runs", quiet=True)
    assert result.steps == 5 and result.verdict.clean, result.verdict.line
    modules = {version: weights_of(result, policy, version) for version in (0, 2, 4)}
    check_rows(result, modules, every=2)
    told = [line["forward_versions"] for line in result.metrics if "loss" in line]
    assert told == [{"ref_logprobs": version} for version in (0, 0, 2, 2, 4)]


def test_a_teacher_reads_with_the_moving_average(
    policy: Path, tmp_path: Path, machine: None
) -> None:
    torch.set_num_threads(1)
    result = run(refreshed(policy, every=1, decay=0.5), steps=4, runs=tmp_path / "runs", quiet=True)
    assert result.steps == 4 and result.verdict.clean, result.verdict.line
    check_rows(result, {step: averaged(result, policy, step, 0.5) for step in range(4)}, every=1)


@pytest.mark.slow
def test_a_reference_begins_with_its_own_model(policy: Path, tmp_path: Path, machine: None) -> None:
    """Which may be another than the one that is trained."""
    torch.set_num_threads(1)
    other = load_model(Model(str(policy)))
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(0.5)
    own = Model(str(saved(other, tmp_path / "other"))).frozen()
    result = run(
        refreshed(policy, every=2, own=own),
        steps=3,
        on=inline(),
        runs=tmp_path / "runs",
        quiet=True,
    )
    check_rows(result, {0: load_model(own), 2: weights_of(result, policy, 2)}, every=2)


def outcome(result: Result) -> list[Any]:
    """Losses, and of every row its version and numbers, to the bit."""
    lines = [
        line["loss"] for line in RunFolder.open(result.folder).read_metrics() if "loss" in line
    ]
    rows = [
        (row["group_id"], row["ref_logprobs_version"], row["ref_logprobs"])
        for step in range(1, len(lines) + 1)
        for row in rows_of(result, step)
    ]
    return [lines, rows]


KINDS = [{"every": 2}, {"every": 1, "decay": 0.5}, {"every": 2, "decay": 0.5}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[:2]), KINDS[2]], ids=str
)
def test_a_run_that_goes_on_reads_with_the_versions_of_one_that_never_stopped(
    kind: Mapping[str, Any], policy: Path, tmp_path: Path
) -> None:
    """It stops between two versions: what the reference has, and the average, come back with the
    checkpoint.
    """
    torch.set_num_threads(1)

    def graph() -> Graph:
        return refreshed(policy, checkpoint_every=None, **kind)

    straight = run(graph(), steps=5, on=inline(), runs=tmp_path / "straight", quiet=True)
    part = run(graph(), steps=3, on=inline(), runs=tmp_path / "part", quiet=True)
    whole = run(graph(), steps=5, on=inline(), resume=part.folder, quiet=True)
    assert whole.verdict.clean and whole.steps == 5, whole.verdict.line
    assert outcome(whole) == outcome(straight)
    steps = [
        (each.recorded_loss, each.loss) for each in replay(graph(), Wishes(run=str(whole.folder)))
    ]
    assert len(steps) == 5 and all(recorded == now for recorded, now in steps)


@pytest.mark.parametrize("victim", ["reference", "trainer"])
@pytest.mark.slow
def test_who_is_killed_between_two_versions_has_the_same_version_again(
    victim: str, policy: Path, tmp_path: Path, machine: None
) -> None:
    """The trainer makes the steps after its checkpoint again; the reference has its own model, and
    has to hear of the version that it had.
    """
    torch.set_num_threads(1)
    kind = {"every": 2, "decay": 0.5, "checkpoint_every": 3}
    straight = run(
        refreshed(policy, **kind), steps=6, on=inline(), runs=tmp_path / "straight", quiet=True
    )
    mark = tmp_path / "struck"

    def blow() -> None:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    after = {"trainer": 9, "reference": 4}[victim]
    graph = refreshed(
        policy, around={victim: lambda operator: struck(operator, blow, after)}, **kind
    )
    limits = Limits(stop_s=2.0, patience=Patience(first_s=0.05, of_one=2))
    result = run(graph, steps=6, runs=tmp_path / "runs", limits=limits, quiet=True)
    assert mark.exists() and result.verdict.clean, result.verdict.line
    lines, rows = outcome(result)
    expected_lines, expected = outcome(straight)
    np.testing.assert_allclose(lines, expected_lines, atol=1e-5)
    assert [row[:2] for row in rows] == [row[:2] for row in expected]
    for (*_, ours), (*_, theirs) in zip(rows, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
def test_an_asynchronous_run_says_which_version_it_read_with(
    policy: Path, tmp_path: Path, machine: None
) -> None:
    """One no older than that which belongs to the group's newest token."""
    torch.set_num_threads(1)
    result = run(
        refreshed(policy, every=2, max_staleness=2), steps=5, runs=tmp_path / "runs", quiet=True
    )
    assert result.steps == 5 and result.verdict.clean, result.verdict.line
    modules = {version: weights_of(result, policy, version) for version in (0, 2, 4)}
    for step in range(1, 6):
        for row in rows_of(result, step):
            version = row["ref_logprobs_version"]
            assert max(row["versions"]) // 2 * 2 <= version <= step - 1
            np.testing.assert_allclose(
                row["ref_logprobs"], plain_logprobs(modules[version], row), atol=1e-4
            )


@pytest.mark.slow
def test_each_rank_of_a_trainer_averages_what_it_holds(
    policy: Path, tmp_path: Path, machine: None
) -> None:
    torch.set_num_threads(1)
    graph = refreshed(policy, every=2, decay=0.5)
    result = run(graph, ranks={"trainer": 2}, steps=4, runs=tmp_path / "runs", quiet=True)
    assert result.steps == 4 and result.verdict.clean, result.verdict.line
    check_rows(result, {step: averaged(result, policy, step, 0.5) for step in (0, 2)}, every=2)


@pytest.mark.slow
def test_adapters_refresh_a_reference_that_has_them(policy: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    g, model = Graph("adapted"), Model(str(policy), name="policy", lora=LoRA(rank=4))
    generator, reference = Generator(model, group_size=4, max_tokens=8, slots=32), Logprobs(model)
    trainer = Trainer(model, loss=with_reference, prompts_per_step=4, lr=3e-2, normalize="rollouts")
    trainer(
        advantage(reward(reference(generator(g.source(Prompts(words(), columns=("answer",)))))))
    )
    g.feedback(trainer.weights, generator, max_staleness=0)
    g.feedback(trainer.weights, reference, every=2)
    result = run(g, steps=3, on=inline(), runs=tmp_path, quiet=True)
    first = load_model(Model(str(policy)))
    for row in [*rows_of(result, 1), *rows_of(result, 2)]:
        np.testing.assert_allclose(row["ref_logprobs"], plain_logprobs(first, row), atol=1e-4)
    for row in rows_of(result, 3):  # generator and reference have the same adapters
        np.testing.assert_allclose(row["ref_logprobs"], row["logprobs"], atol=1e-4)
        assert row["ref_logprobs_version"] == 2 == max(row["versions"])
