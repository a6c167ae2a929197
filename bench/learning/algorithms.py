"""The algorithms of the learning bench as data: what each one changes in the graph of synchronous
AIPO.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dataflow import Graph, Model, scorer
from dataflow.node import Source
from dataflow.scorer import Scorer
from graphs.tasks import calculator
from operators import Evaluate, Generator, Logprobs, Trainer, Values
from operators.credit import advantage, gae, leave_one_out, normalized_advantage
from operators.filters import has_signal
from operators.losses import aipo, dapo, distill, grpo, ppo, rloo, value_loss

GROUP_SIZE, PROMPTS_PER_STEP, WARMUP_STEPS = 8, 32, 20
LR, CRITIC_LR = 1e-4, 3e-4


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """How a step is made of rollouts; everything else is the same for all."""

    loss: Callable[..., Any] = partial(aipo, rho=4.0)
    credit: Scorer[..., Any] | None = advantage
    """None: the loss needs none."""
    normalize: str = "rollouts"
    whiten: bool = False
    max_staleness: int = 0
    filters: tuple[Scorer[..., Any], ...] = ()
    """Groups that they drop are generated, and count towards the budget."""
    has_critic: bool = False
    has_teacher: bool = False


def _uncorrected(max_staleness: int) -> Algorithm:
    """AIPO's advantage without its importance weights: -A * log pi."""
    return Algorithm(loss=rloo, max_staleness=max_staleness)


ALGORITHMS = {
    "aipo-0": Algorithm(),
    "aipo-1": Algorithm(max_staleness=1),
    "aipo-4": Algorithm(max_staleness=4),
    "aipo-8": Algorithm(max_staleness=8),
    "uncorrected-1": _uncorrected(1),
    "uncorrected-4": _uncorrected(4),
    "uncorrected-8": _uncorrected(8),
    "grpo": Algorithm(loss=grpo, credit=normalized_advantage, normalize="rollout_means"),
    "dapo": Algorithm(
        loss=dapo, credit=normalized_advantage, normalize="tokens", filters=(has_signal,)
    ),
    "rloo": Algorithm(loss=rloo, credit=leave_one_out),
    "ppo": Algorithm(loss=ppo, credit=gae, normalize="tokens", whiten=True, has_critic=True),
    "distill": Algorithm(loss=distill, credit=None, normalize="tokens", has_teacher=True),
}
"""By name; the number is max_staleness, and those without one are synchronous."""


def build(
    name: str, *, policy: str, teacher: str, prompts: Source, held_out: Source, every_steps: int
) -> Graph:
    """The calculator's graph with what the algorithm of that name changes; the run ends with its
    prompts.

    teacher: folder of the model that distillation asks. every_steps: between evaluations on
    `held_out`.
    """
    algorithm = ALGORITHMS[name]
    g, model = Graph(name), Model(policy)
    generator = Generator(model, group_size=GROUP_SIZE, max_tokens=calculator.MAX_TOKENS)
    reward = scorer(calculator.reward)
    trainer = Trainer(
        model,
        loss=algorithm.loss,
        prompts_per_step=PROMPTS_PER_STEP,
        lr=LR,
        normalize=algorithm.normalize,
        whiten=algorithm.whiten,
        warmup_steps=WARMUP_STEPS,
    )
    stream = reward(generator(g.source(prompts)))
    for filter_ in algorithm.filters:
        stream = filter_(stream)
    if algorithm.has_teacher:
        stream = Logprobs(Model(teacher, name="teacher").frozen(), name="teacher_logprobs")(stream)
    critic = Model(policy, head="value", name="critic")
    values = Values(critic)
    if algorithm.has_critic:
        stream = values(stream)
    if algorithm.credit is not None:
        stream = algorithm.credit(stream)
    trainer(stream)
    if algorithm.has_critic:
        learner = Trainer(
            critic,
            loss=value_loss,
            prompts_per_step=PROMPTS_PER_STEP,
            lr=CRITIC_LR,
            warmup_steps=WARMUP_STEPS,
            name="critic",
        )
        learner(stream)
        g.feedback(learner.weights, values, max_staleness=0)
    Evaluate(every_steps=every_steps)(reward(generator(g.source(held_out))))
    g.feedback(trainer.weights, generator, max_staleness=algorithm.max_staleness)
    return g


def examples(path: str, *, held_out: bool) -> list[dict[str, str]]:
    """The calculator steps of a GSM8K file, or made-up ones."""
    if path:
        return list(calculator.read(path))
    return list(calculator.rows(2_000 if held_out else 24_000, seed=1, held_out=held_out))


def budget(rows: Sequence[dict[str, str]], count: int, seed: int) -> list[dict[str, str]]:
    """So many of the rows, in an order drawn from the seed: all of them before any comes again."""
    draw = random.Random(seed)
    chosen: list[dict[str, str]] = []
    while len(chosen) < count:
        chosen += draw.sample(rows, min(len(rows), count - len(chosen)))
    return chosen
