"""Where the numbers of a step stopped being finite; imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dataflow.system.messages import Message
from operators.training.learner.together import local


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
