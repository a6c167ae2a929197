"""Filters: which groups are worth training."""

from dataflow.records import Array
from dataflow.scorer import keep
from operators.credit import are_equal


@keep(isolate=False)
def has_signal(reward: Array) -> bool:
    """Whether a group's rewards differ by more than rounding: dynamic sampling of DAPO (arXiv
    2503.14476, section 3.2).

    Groups that all solve, or that none does, have advantage 0 throughout; others are made in their
    place, so that each step has as many groups with a gradient. Not for rules of credit that
    compare groups with each other, such as `Trainer(whiten=True)`, which such groups teach
    something too. reward: [rollouts of a group without error].

    >>> import numpy as np
    >>> has_signal(np.array([1.0, 1.0])), has_signal(np.array([1.0, 0.0]))
    (False, True)
    """
    return not are_equal(reward)
