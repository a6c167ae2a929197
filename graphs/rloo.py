"""RLOO: plain policy gradient whose baseline is the mean of the other rollouts of the prompt.

python -m graphs.rloo --policy FOLDER_OR_ID --prompts FILE --reward exact|number|my_rewards.py:function
"""

from dataflow import Graph, main
from graphs.pipeline import policy_gradient
from graphs.tasks.text import TextTask
from operators.credit import leave_one_out
from operators.losses import rloo


def build(*, task: TextTask, max_staleness: int = 0) -> Graph:
    """Train a policy on its own rollouts, generation and training taking turns (RLOO, arXiv 2402.14740).

    Args:
        task: what is trained on what.
        max_staleness: versions that the oldest token of a trained rollout may be behind; the loss corrects for none.
    """
    return policy_gradient(
        "rloo", credit=leave_one_out, loss=rloo, max_staleness=max_staleness, normalize="rollouts", **task.pipeline()
    )


if __name__ == "__main__":
    main(build)
