"""Credit of each rollout: how much better it did than its siblings."""

import numpy as np

from dataflow.records import Array
from dataflow.scorer import scorer

ROUNDING = 1e-9
"""Numbers that differ by no more than this share of the largest of them are equal: what computing
leaves is no signal. The one rule of credit, filters, whitening and figures."""


def are_equal(values: Array) -> bool:
    """Whether numbers [n] differ by nothing but rounding.

    >>> import numpy as np
    >>> are_equal(np.array([0.3, 0.1 + 0.2])), are_equal(np.array([0.0, 1e-12]))
    (True, False)
    """
    return not len(values) or bool(np.ptp(values) <= ROUNDING * np.max(np.abs(values)))


def centred(values: Array) -> Array:
    """Minus their mean; 0 where they are equal."""
    return np.zeros(len(values)) if are_equal(values) else np.asarray(values - np.mean(values))


@scorer(per="group", isolate=False)
def advantage(reward: Array) -> Array:
    """How much better each rollout did than its siblings: reward minus their mean (arXiv
    2505.24034).

    No division by the standard deviation, which would weigh groups by how rarely they differ (Dr.
    GRPO, arXiv 2503.20783). reward: [rollouts of a group without error].

    >>> import numpy as np
    >>> advantage(np.array([1.0, 0.0, 0.0, 1.0])).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    return centred(reward)


@scorer(per="group", isolate=False, name="advantage")
def normalized_advantage(reward: Array, epsilon: float = 1e-4) -> Array:
    """GRPO's: reward minus the mean, divided by the group's standard deviation (arXiv 2402.03300).

    The deviation is that of the sample (n - 1 below the root); a group of equal rewards has
    advantage 0. reward: [rollouts of a group without error]. epsilon: added to the deviation.

    >>> import numpy as np
    >>> normalized_advantage(np.array([1.0, 0.0, 0.0, 1.0])).round(2).tolist()
    [0.87, -0.87, -0.87, 0.87]
    """
    if are_equal(reward):
        return np.zeros(len(reward))
    return np.asarray(centred(reward) / (np.std(reward, ddof=1) + epsilon))


@scorer(per="group", isolate=False, name="advantage")
def leave_one_out(reward: Array) -> Array:
    """RLOO's: reward minus the mean of the other rollouts' (arXiv 2402.14740).

    The baseline does not depend on the rollout itself, which makes the estimate unbiased: n / (n -
    1) times `advantage`. A rollout alone has advantage 0. reward: [rollouts of a group without
    error].

    >>> import numpy as np
    >>> leave_one_out(np.array([1.0, 0.0, 0.0])).tolist()
    [1.0, -0.5, -0.5]
    """
    siblings = max(1, len(reward) - 1)
    return np.asarray(centred(reward) * (len(reward) / siblings))
