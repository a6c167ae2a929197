"""GRPO: the synchronous baseline; every rollout is trained by the weights that made it.

python -m graphs.grpo --policy FOLDER_OR_ID --prompts FILE --reward exact
"""

from functools import partial

from dataflow import Graph, GraphError, main
from graphs.tasks.options import penalized
from graphs.tasks.text import TextTask
from operators.credit import normalized_advantage
from operators.losses import grpo


def build(
    *,
    task: TextTask,
    max_staleness: int = 0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl: float = 0.0,
    refresh_reference: int = 0,
    entropy: float = 0.0,
) -> Graph:
    """Train a policy on its own rollouts, in turn with generation (GRPO, arXiv 2402.03300).

    Args:
        task: what is trained on what.
        max_staleness: versions a trained rollout's oldest token may be behind; 0 is synchronous.
        clip_low: how far below 1 the ratio may fall before its gradient ends.
        clip_high: how far above 1 it may rise.
        kl: what a nat of distance from the reference costs, in the loss; the paper's is 0.04.
        refresh_reference: steps after which the policy becomes the reference, again and again; 0:
            the first one stays.
        entropy: what a nat of the policy's entropy is worth, in the loss; 0: nothing.
    """
    if refresh_reference and not kl:
        raise GraphError(
            f"--refresh-reference {refresh_reference} would have no effect without --kl; give both"
        )
    g = Graph("grpo")
    generator, reward, reference = task.generator(), task.scorer(), task.logprobs()
    rollouts = generator(g.source(task.train))
    if kl:
        rollouts = reference(rollouts)
    loss = partial(grpo, clip_low=clip_low, clip_high=clip_high)
    loss = penalized(loss, kl=kl, corrected=max_staleness > 0, entropy=entropy)
    trainer = task.trainer(loss=loss, normalize="rollout_means")

    trainer(normalized_advantage(reward(rollouts)))
    task.evaluate(g, generator, reward)
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    if refresh_reference:
        g.feedback(trainer.weights, reference, every=refresh_reference)
    return g


if __name__ == "__main__":
    main(build)
