"""Asynchronous AIPO: generation never waits, and weights may change in the middle of a rollout.

python -m graphs.aipo --policy FOLDER_OR_ID --prompts FILE --reward exact|number|my_rewards.py:function
"""

from functools import partial

from dataflow import Graph, main
from graphs.pipeline import policy_gradient
from graphs.tasks.text import TextTask
from operators.credit import advantage
from operators.losses import aipo


def build(*, task: TextTask, max_staleness: int = 4, rho: float = 4.0, kl: float = 0.0) -> Graph:
    """Train a policy on its own rollouts, at most `max_staleness` versions old (LlamaRL, arXiv 2505.24034).

    Args:
        task: what is trained on what.
        max_staleness: versions that the oldest token of a trained rollout may be behind; 0 is synchronous.
        rho: cap of the importance weight.
        kl: what a nat of distance from the policy at the start costs, in the loss; 0: nothing.
    """
    return policy_gradient(
        "aipo", credit=advantage, loss=partial(aipo, rho=rho), max_staleness=max_staleness, kl=kl, **task.pipeline()
    )


if __name__ == "__main__":
    main(build)
