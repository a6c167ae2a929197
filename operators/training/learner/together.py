"""The ranks that train one model, as their learners see one another; imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Together(Protocol):
    """The ranks that train one model, as their learners see one another."""

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of all ranks' gradients together."""

    def clip(self, gradients: Sequence[Tensor], most: float, norm: Tensor) -> None:
        """Scale the gradients down so that their norm is `most`, if it is above."""

    def total(self, sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """The ranks' sums, float64 [n], added up, and the largest of their maxima, float64 []."""


class Alone:
    """A model on one rank."""

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Of its gradients."""
        return torch.nn.utils.get_total_norm(gradients)

    def clip(self, gradients: Sequence[Tensor], most: float, norm: Tensor) -> None:
        """As torch does."""
        scale = torch.clamp(most / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(list(gradients), scale)

    def total(self, sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Its own."""
        return sums, largest


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that ranks share out (a DTensor); else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
