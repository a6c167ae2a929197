"""Ratios, and sums and means over each rollout's tokens, laid out per token again; without waiting
for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


MOST_LOG_RATIO = 20.0
"""Of a token, or of a rollout's mean. e^89 is no float32 any more, and infinity times 0 in one
token's gradient would cost the whole step."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp, held at e^20, where it has no gradient: two policies that are further apart agree in
    nothing.
    """
    return log_ratio.clamp(max=MOST_LOG_RATIO).exp()


def total(values: Tensor, index: Tensor) -> Tensor:
    """Sums by index, [T]: entry i is that of index i. There are no more rollouts or groups than
    tokens.
    """
    return values.new_zeros(len(values)).index_add(0, index, values)


def sum_per_rollout(values: Tensor, rollout_index: Tensor) -> Tensor:
    """At each token [T] the sum over its rollout's tokens."""
    return total(values, rollout_index)[rollout_index]


def mean_per_rollout(values: Tensor, rollout_index: Tensor) -> Tensor:
    """At each token [T] the mean over its rollout's tokens."""
    return sum_per_rollout(values, rollout_index) / sum_per_rollout(
        values.new_ones(len(values)), rollout_index
    )
