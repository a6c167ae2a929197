"""Credit: how much of a group's rewards each rollout is answerable for, as scorers over the rows of a group."""

import numpy as np

from dataflow.records import Array
from dataflow.scorer import scorer


@scorer(per="group", isolate=False)
def advantage(reward: Array) -> Array:
    """How much better each rollout did than its siblings: reward minus their mean (LlamaRL, arXiv 2505.24034).

    No division by the standard deviation, which would weigh groups by how rarely they differ (Dr. GRPO,
    arXiv 2503.20783). reward: [rollouts of a group without error].
    """
    return reward - reward.mean()


@scorer(per="group", isolate=False, name="advantage")
def normalized_advantage(reward: Array, epsilon: float = 1e-4) -> Array:
    """GRPO's: reward minus the mean, divided by the standard deviation of the group (arXiv 2402.03300, eq. 3 on).

    The deviation is that of the sample (n - 1 below the root); a group of equal rewards has advantage 0.
    reward: [rollouts of a group without error]. epsilon: added to the deviation.
    """
    centred = reward - reward.mean()
    if len(reward) < 2:
        return centred
    return centred / (np.std(reward, ddof=1) + epsilon)
