"""DAPO: GRPO that replaces groups of equally good answers, clips higher, punishes long answers.

python -m graphs.dapo --policy FOLDER_OR_ID --prompts FILE --reward exact
"""

from functools import partial

from dataflow import Array, Graph, keep, main
from graphs.tasks.options import penalized
from graphs.tasks.text import TextTask
from operators.credit import normalized_advantage
from operators.losses import dapo
from operators.rewards import combine, overlong


@keep(isolate=False)
def undecided(accuracy: Array) -> bool:
    """Some answers are better than others; length alone is no signal (equation 11)."""
    return bool(accuracy.max() > accuracy.min())


def build(
    *,
    task: TextTask,
    max_staleness: int = 0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    overlong_share: float = 0.2,
    kl: float = 0.0,
    entropy: float = 0.0,
) -> Graph:
    """Train a policy on groups that have a signal (DAPO, arXiv 2503.14476).

    Args:
        task: what is trained on what.
        max_staleness: versions a trained rollout's oldest token may be behind; 0 is synchronous.
        clip_low: how far below 1 the ratio may fall before its gradient ends.
        clip_high: how far above 1 it may rise.
        overlong_share: the last part of max_tokens, in which the reward falls by up to 1.
        kl: what a nat of distance from the policy at the start costs, in the loss; 0: nothing.
        entropy: what a nat of the policy's entropy is worth, in the loss; 0: nothing.
    """
    g, reward = Graph("dapo"), combine({"accuracy": 1.0, "overlong": 1.0})
    generator, accuracy = task.generator(), task.scorer().renamed("accuracy")
    punished = overlong(task.max_tokens, max(1, int(task.max_tokens * overlong_share)))
    loss = partial(dapo, clip_low=clip_low, clip_high=clip_high)
    loss = penalized(loss, kl=kl, corrected=max_staleness > 0, entropy=entropy)
    trainer = task.trainer(loss=loss)

    judged = undecided(accuracy(generator(g.source(task.train))))
    judged = task.logprobs()(judged) if kl else judged
    trainer(normalized_advantage(reward(punished(judged))))
    task.evaluate(g, generator, accuracy)
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build)
