"""Tapered off-policy REINFORCE (arXiv 2503.14286); least-variance baseline (arXiv 2505.23585)."""

import numpy as np
import torch

from dataflow import Array, Graph, Model, keep, main, scorer
from operators import Generator, Prompts, Trainer
from operators.rewards import find


@keep
def undecided(reward: Array) -> bool:
    """Neither all rollouts are right, nor none."""
    return bool(0 < reward.mean() < 1)


@scorer(per="group")
def advantage(reward: Array, mask: list[Array]) -> Array:
    """How much better each rollout did than the group, in whose mean long rollouts weigh more."""
    return reward - np.average(reward, weights=[row.sum() for row in mask])


def tapered(new_logprobs, logprobs, advantage, rollout_index):
    """Good rollouts count in full; bad ones less and less as the policy comes to avoid them."""
    gap = new_logprobs.detach() - logprobs
    gap = torch.zeros_like(logprobs).index_add(0, rollout_index, gap)[rollout_index]
    return -torch.where(advantage > 0, 1.0, gap.exp().clamp(max=1.0)) * advantage * new_logprobs


def build(*, policy: str, prompts: str, max_staleness: int = 2, lr: float = 2e-3) -> Graph:
    g, model = Graph("tapered"), Model(policy)
    generator = Generator(model, group_size=8, max_tokens=4)
    trainer = Trainer(model, loss=tapered, prompts_per_step=8, lr=lr, normalize="rollouts")
    rewarded = find("exact")(generator(g.source(Prompts(prompts, columns=("answer",)))))
    trainer(advantage(undecided(rewarded)))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build, steps=12)
