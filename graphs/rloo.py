"""RLOO: plain policy gradient whose baseline is the mean of the other rollouts of the prompt.

python -m graphs.rloo --policy FOLDER_OR_ID --prompts FILE --reward exact
"""

from dataflow import Graph, main
from graphs.tasks.options import penalized
from graphs.tasks.text import TextTask
from operators.credit import leave_one_out
from operators.losses import rloo


def build(
    *, task: TextTask, max_staleness: int = 0, kl: float = 0.0, entropy: float = 0.0
) -> Graph:
    """Train a policy on its own rollouts, in turn with generation (RLOO, arXiv 2402.14740).

    Args:
        task: what is trained on what.
        max_staleness: versions that the oldest token of a trained rollout may be behind; the loss
            corrects for none.
        kl: what a nat of distance from the policy at the start costs, in the loss; 0: nothing.
        entropy: what a nat of the policy's entropy is worth, in the loss; 0: nothing.
    """
    g = Graph("rloo")
    generator, reward = task.generator(), task.scorer()
    rollouts = generator(g.source(task.train))
    if kl:
        rollouts = task.logprobs()(rollouts)
    loss = penalized(rloo, kl=kl, corrected=max_staleness > 0, entropy=entropy)
    trainer = task.trainer(loss=loss, normalize="rollouts")

    trainer(leave_one_out(reward(rollouts)))
    task.evaluate(g, generator, reward)
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build)
