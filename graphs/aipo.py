"""Asynchronous AIPO: generation never waits, and weights may change in the middle of a rollout.

python -m graphs.aipo --policy FOLDER_OR_ID --prompts FILE --reward exact
"""

from functools import partial

from dataflow import Graph, main
from graphs.tasks.options import penalized
from graphs.tasks.text import TextTask
from operators.credit import advantage
from operators.losses import aipo


def build(
    *,
    task: TextTask,
    max_staleness: int = 4,
    rho: float = 4.0,
    kl: float = 0.0,
    entropy: float = 0.0,
) -> Graph:
    """Train a policy on its own rollouts, which may be stale (LlamaRL, arXiv 2505.24034).

    Args:
        task: what is trained on what.
        max_staleness: versions a trained rollout's oldest token may be behind; 0 is synchronous.
        rho: cap of the importance weight.
        kl: what a nat of distance from the policy at the start costs, in the loss; 0: nothing.
        entropy: what a nat of the policy's entropy is worth, in the loss; 0: nothing.
    """
    g = Graph("aipo")
    generator, reward, loss = task.generator(), task.scorer(), partial(aipo, rho=rho)
    rollouts = generator(g.source(task.train))
    if kl:
        rollouts = task.logprobs()(rollouts)
    loss = penalized(loss, kl=kl, corrected=max_staleness > 0, entropy=entropy)
    trainer = task.trainer(loss=loss)

    trainer(advantage(reward(rollouts)))
    task.evaluate(g, generator, reward)
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build)
