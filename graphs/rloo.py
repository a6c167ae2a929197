"""RLOO: plain policy gradient whose baseline is the mean of the other rollouts of the prompt.

python -m graphs.rloo --policy FOLDER_OR_ID --prompts FILE --reward exact|number|my_rewards.py:function
"""

from dataflow import Graph, main
from graphs.tasks.text import TextTask
from operators import Trainer
from operators.credit import leave_one_out
from operators.losses import rloo


def build(*, task: TextTask, max_staleness: int = 0) -> Graph:
    """Train a policy on its own rollouts, generation and training taking turns (RLOO, arXiv 2402.14740).

    Args:
        task: what is trained on what.
        max_staleness: versions that the oldest token of a trained rollout may be behind; the loss corrects for none.
    """
    g = Graph("rloo")
    generator, reward = task.generator(), task.scorer()
    trainer = Trainer(task.model, loss=rloo, prompts_per_step=task.prompts_per_step, lr=task.lr, normalize="rollouts")

    trainer(leave_one_out(reward(generator(g.source(task.train)))))
    task.evaluate(g, generator, reward)
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build)
