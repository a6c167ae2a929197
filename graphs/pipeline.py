"""The wiring that the policy-gradient graphs share: prompts, rollouts, reward, credit, trainer, held-out prompts."""

from collections.abc import Callable
from typing import Any

from dataflow import Graph, Model
from dataflow.node import Source
from dataflow.scorer import Scorer
from operators import Evaluate, Generator, Logprobs, Trainer
from operators.losses import with_kl


def policy_gradient(
    name: str,
    *,
    policy: str,
    prompts: Source,
    held_out: Source | None,
    reward: Scorer[..., Any],
    credit: Scorer[..., Any],
    loss: Callable[..., Any],
    max_staleness: int,
    max_tokens: int,
    group_size: int,
    prompts_per_step: int,
    lr: float,
    every_steps: int = 50,
    normalize: str = "tokens",
    dtype: str = "float32",
    chat: bool = False,
    kl: float = 0.0,
    **trainer_knobs: Any,
) -> Graph:
    """A graph that trains `policy` on the rewards of its own rollouts, and evaluates it on held-out prompts.

    kl: what a nat of distance from the policy at the start costs in the loss; 0: no reference is loaded.
    """
    g = Graph(name)
    model = Model(policy, dtype=dtype)
    generator = Generator(model, group_size=group_size, max_tokens=max_tokens, chat=chat)
    rollouts = generator(g.source(prompts))
    if kl:
        rollouts = Logprobs(model.frozen())(rollouts)
        loss = with_kl(loss, kl, corrected=max_staleness > 0)
    trainer = Trainer(model, loss=loss, prompts_per_step=prompts_per_step, lr=lr, normalize=normalize, **trainer_knobs)
    trainer(credit(reward(rollouts)))
    if held_out is not None:
        Evaluate(every_steps=every_steps)(reward(generator(g.source(held_out))))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g
