"""GRPO: the synchronous baseline; every rollout is trained by the weights that made it.

python -m graphs.grpo --policy FOLDER_OR_ID --prompts FILE --reward exact|number|my_rewards.py:function
"""

from functools import partial

from dataflow import Graph, main
from graphs.pipeline import policy_gradient
from graphs.tasks.text import TextTask
from operators.credit import normalized_advantage
from operators.losses import grpo


def build(
    *, task: TextTask, max_staleness: int = 0, clip_low: float = 0.2, clip_high: float = 0.2, kl: float = 0.0
) -> Graph:
    """Train a policy on its own rollouts, generation and training taking turns (GRPO, arXiv 2402.03300).

    Args:
        task: what is trained on what.
        max_staleness: versions that the oldest token of a trained rollout may be behind; 0 is synchronous.
        clip_low: how far below 1 the ratio may fall before its gradient ends.
        clip_high: how far above 1 it may rise.
        kl: what a nat of distance from the policy at the start costs, in the loss; the paper's is 0.04.
    """
    return policy_gradient(
        "grpo", credit=normalized_advantage, loss=partial(grpo, clip_low=clip_low, clip_high=clip_high),
        max_staleness=max_staleness, normalize="rollout_means", kl=kl, **task.pipeline(),
    )  # fmt: skip


if __name__ == "__main__":
    main(build)
