"""Graphs of many shapes and sizes: each makes its steps, loses nothing, and never stands still."""

import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from rigs.graphs import reward, words

from dataflow import Array, Graph, Model, inline, join, keep, run, scorer, verify
from dataflow.errors import DeadlineError
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits
from dataflow.planning import wiring
from operators import Evaluate, Generator, Logprobs, Prompts, Trainer, Values
from operators.credit import advantage, token_gae, token_rewards
from operators.losses import aipo, value_loss
from transport.data.local import LocalInlet

pytestmark = pytest.mark.usefixtures("one_core")


@scorer(name="advantage", isolate=False)
def plain(reward: float) -> float:
    """Of a rollout that is alone in its group."""
    return reward


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a seed makes of a graph."""

    steps: int
    prompts_per_step: int
    group_size: int
    max_tokens: int
    slots: int
    in_flight: int | None
    max_staleness: int | None
    """None: another model is trained than the one that generates."""
    kept: float
    """Share of the groups that a filter lets pass."""
    is_late: bool
    """Whether the filter comes last, after what reads weights."""
    has_reference: bool
    critic_prompts_per_step: int | None
    """None: no critic."""
    critic_staleness: int
    prompts: int
    epochs: int | None
    every_steps: int | None
    """Between rounds of evaluation; None: there are none."""
    questions: int
    checkpoint_every: int
    generators: int
    """Replicas, where they are processes of their own."""

    @classmethod
    def of(cls, seed: int) -> "Shape":
        """The shape of a seed."""
        draw = Random(seed)
        prompts_per_step = draw.choice([1, 2, 3, 5, 8, 16, 17, 40, 130, 600])
        has_feedback = draw.random() < 0.8
        critic = (
            draw.choice([prompts_per_step, 1, 7, 2 * prompts_per_step])
            if draw.random() < 0.3
            else None
        )
        most = max(prompts_per_step, critic or 0)
        steps, epochs = draw.randint(1, 3), draw.choice([None, None, None, 1, 2])
        return cls(
            steps=steps,
            prompts_per_step=prompts_per_step,
            group_size=draw.choice([1, 2, 4]) if prompts_per_step < 100 else 1,
            max_tokens=draw.choice([1, 3, 6]),
            slots=draw.choice([4, 32, 128]),
            in_flight=draw.choice([None, None, most, 2 * most]),
            max_staleness=draw.choice([0, 0, 1, 2, 5]) if has_feedback else None,
            kept=draw.choice([1, 1, 2 / 3, 1 / 3, 1 / 7] if prompts_per_step < 100 else [1, 2 / 3]),
            is_late=draw.random() < 0.5,
            has_reference=draw.random() < 0.3,
            critic_prompts_per_step=critic,
            critic_staleness=draw.choice([0, 1, 3]),
            prompts=max(most, draw.choice([1, 40, most * steps]))
            if epochs
            else draw.choice([1, 3, 40]),
            epochs=epochs,
            every_steps=draw.choice([None, None, 1, 2]) if has_feedback else None,
            questions=draw.choice([1, 6, 50]),
            checkpoint_every=draw.choice([1, 2, 100]),
            generators=draw.choice([1, 2]),
        )


def passes(group: int, share: float) -> bool:
    """Whether the filter of that share keeps a group."""
    return zlib.crc32(f"group {group}".encode()) % 1000 < 1000 * share


def some_of(share: float) -> Callable[..., Any]:
    """A filter that keeps about that share."""

    @keep(isolate=False)
    def lucky(group_id: Array) -> bool:
        return passes(int(group_id[0]), share)

    return lucky


def build(shape: Shape, policy: Path) -> Graph:
    """The graph of a shape."""
    g, model = Graph("shape"), Model(str(policy), name="policy")
    trained = model if shape.max_staleness is not None else Model(str(policy), name="student")
    generator = Generator(
        model,
        group_size=shape.group_size,
        max_tokens=shape.max_tokens,
        segment_tokens=2,
        slots=shape.slots,
        in_flight=shape.in_flight,
    )
    actor = Trainer(
        trained,
        loss=partial(aipo, rho=4.0),
        prompts_per_step=shape.prompts_per_step,
        lr=1e-3,
        normalize="rollouts",
        checkpoint_every=shape.checkpoint_every,
    )
    trainers, keeps = [actor], some_of(shape.kept)
    stream = reward(
        generator(g.source(Prompts(words(shape.prompts), columns=("answer",), epochs=shape.epochs)))
    )
    stream = stream if shape.is_late else keeps(stream)
    if shape.critic_prompts_per_step is not None:
        expected = Model(str(policy), head="value", name="critic")
        values = Values(expected)
        critic = Trainer(
            expected,
            name="critic",
            loss=value_loss,
            prompts_per_step=shape.critic_prompts_per_step,
            lr=1e-3,
        )
        trainers.append(critic)
        stream = token_rewards(join(Logprobs(model.frozen())(stream), values(stream)), beta=0.01)
        stream = token_gae(stream, lam=0.95)
        g.feedback(critic.weights, values, max_staleness=shape.critic_staleness)
    else:
        stream = Logprobs(model.frozen())(stream) if shape.has_reference else stream
        stream = advantage(stream) if shape.group_size > 1 else plain(stream)
    stream = keeps(stream) if shape.is_late else stream
    for trainer in trainers:
        trainer(stream)
    if shape.every_steps is not None:
        held_out = Prompts(
            words(shape.questions), columns=("answer",), name="held_out", group_size=2
        )
        Evaluate(every_steps=shape.every_steps)(reward(generator(g.source(held_out))))
    if shape.max_staleness is not None:
        g.feedback(actor.weights, generator, max_staleness=shape.max_staleness)
    return g


def wanted(shape: Shape) -> dict[str, int]:
    """By trainer: groups of the steps that the prompts are enough for."""
    sizes = {"trainer": shape.prompts_per_step}
    if shape.critic_prompts_per_step is not None:
        sizes["critic"] = shape.critic_prompts_per_step
    if shape.epochs is None:
        return {name: shape.steps * size for name, size in sizes.items()}
    enough = sum(passes(group, shape.kept) for group in range(shape.epochs * shape.prompts))
    return {name: min(shape.steps, enough // size) * size for name, size in sizes.items()}


Holds = Callable[..., None]


@pytest.fixture
def holds(policy: Path, tmp_path: Path) -> Holds:
    """The run of a seed makes its steps, and its ledger is clean."""
    torch.set_num_threads(1)

    def check(seed: int, *, in_processes: bool = False) -> None:
        shape = Shape.of(seed)
        how: dict[str, Any] = (
            {"replicas": {"generator": shape.generators}} if in_processes else {"on": inline()}
        )
        limits = Limits() if in_processes else Limits(stall_s=10.0)
        result = run(
            build(shape, policy),
            steps=shape.steps,
            seed=seed,
            runs=tmp_path,
            quiet=True,
            limits=limits,
            **how,
        )
        verdict = verify(result.folder)
        assert verdict.clean, f"seed {seed}: {verdict.line}"
        with Ledger.open(RunFolder.open(result.folder).ledger, readonly=True) as ledger:
            trained = {name: ledger.counts(name).trained for name in wanted(shape)}
        assert trained == wanted(shape), f"seed {seed}"
        shutil.rmtree(result.folder)

    return check


@pytest.mark.parametrize("seed", range(4))
def test_a_graph_of_any_shape_makes_its_steps(seed: int, holds: Holds) -> None:
    holds(seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_graphs_of_300_shapes_make_their_steps(first: int, holds: Holds) -> None:
    for seed in range(first, first + 50):
        holds(seed)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(300, 316))
def test_a_graph_of_any_shape_makes_its_steps_in_processes(
    seed: int, holds: Holds, machine: None
) -> None:
    holds(seed, in_processes=True)


def rows_are_acknowledged_with_their_batch_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalInlet, "_acknowledge_rows", lambda *_: None)


def edges_do_not_know_the_longest_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wiring, "_longest_step", lambda *_: 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "broken", [rows_are_acknowledged_with_their_batch_alone, edges_do_not_know_the_longest_step]
)
def test_some_shape_stands_still_where(
    broken: Callable[[pytest.MonkeyPatch], None], holds: Holds, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises(DeadlineError, match="nothing has moved"):
        for seed in range(40):
            holds(seed)
