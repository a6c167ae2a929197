"""Sums and means over each rollout's tokens, laid out per token again; without waiting for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def total(values: Tensor, index: Tensor) -> Tensor:
    """Sums by index, [T]: entry i is that of index i. There are no more rollouts or groups than tokens."""
    return values.new_zeros(len(values)).index_add(0, index, values)


def sum_per_rollout(values: Tensor, rollout_index: Tensor) -> Tensor:
    """At each token [T] the sum over its rollout's tokens."""
    return total(values, rollout_index)[rollout_index]


def mean_per_rollout(values: Tensor, rollout_index: Tensor) -> Tensor:
    """At each token [T] the mean over its rollout's tokens."""
    return sum_per_rollout(values, rollout_index) / sum_per_rollout(values.new_ones(len(values)), rollout_index)
