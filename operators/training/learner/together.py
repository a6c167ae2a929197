"""The ranks that train one model, as their learners see one another; imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dataflow.system.messages import Message


class Together(Protocol):
    """The ranks that train one model, as their learners see one another."""

    @property
    def tensor(self) -> int:
        """Ranks, side by side, that compute the same rollouts."""

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of all ranks' gradients together."""

    def total(self, sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """The ranks' sums, float64 [n], added up, and the largest of their maxima, float64 []."""


class Alone:
    """A model on one rank."""

    tensor = 1

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Of its gradients."""
        return torch.nn.utils.get_total_norm(gradients)

    def total(self, sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Its own."""
        return sums, largest


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that ranks share out (a DTensor); else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class NotFinite(Message):
    """What was not finite."""

    rollouts: Sequence[int] = ()
    """Whose loss was not, by rollout_id."""
    weights: Sequence[str] = ()
    """Parameters."""
    gradients: Sequence[str] = ()
    """Parameters."""

    def __or__(self, other: NotFinite) -> NotFinite:
        """Those of two ranks."""
        return NotFinite(
            list(dict.fromkeys([*self.rollouts, *other.rollouts])),
            list(dict.fromkeys([*self.weights, *other.weights])),
            list(dict.fromkeys([*self.gradients, *other.gradients])),
        )

    def __str__(self) -> str:
        """Where the numbers stopped being finite: rollouts if the loss was not, else the first
        parameter.
        """
        if self.weights:
            return f"the weights of '{self.weights[0]}' ({len(self.weights)} tensors)"
        if self.rollouts:
            return (
                "the loss of rollouts"
                f" {list(self.rollouts[:8])}{' and more' if len(self.rollouts) > 8 else ''}"
            )
        if self.gradients:
            return f"the gradient of '{self.gradients[0]}' ({len(self.gradients)} tensors)"
        return "the gradient norm"


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors with a non-finite number in this rank's part."""
    return [name for name, tensor in tensors.items() if not torch.isfinite(local(tensor)).all()]
