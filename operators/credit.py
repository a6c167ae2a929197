"""Credit: how much better or worse each rollout did than its group, as scorers over the rows of a group."""

import numpy as np

from dataflow.records import Array
from dataflow.scorer import scorer


@scorer(per="group", isolate=False)
def advantage(reward: Array) -> Array:
    """How much better each rollout did than its siblings: reward minus their mean (arXiv 2505.24034).

    No division by the standard deviation, which would weigh groups by how rarely they differ (Dr. GRPO,
    arXiv 2503.20783). reward: [rollouts of a group without error].
    """
    return np.asarray(reward - reward.mean())


@scorer(per="group", isolate=False, name="advantage")
def normalized_advantage(reward: Array, epsilon: float = 1e-4) -> Array:
    """GRPO's: reward minus the mean, divided by the group's standard deviation (arXiv 2402.03300).

    The deviation is that of the sample (n - 1 below the root); a group of equal rewards has advantage 0.
    reward: [rollouts of a group without error]. epsilon: added to the deviation.
    """
    centred = np.asarray(reward - reward.mean())
    if len(reward) < 2:
        return centred
    return np.asarray(centred / (np.std(reward, ddof=1) + epsilon))
