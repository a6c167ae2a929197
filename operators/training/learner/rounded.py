"""AdamW whose moments are kept in fewer bits than it computes with; imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from operators.training.learner.together import local

PART = 1 << 22
"""Numbers whose moments are in float32 at once."""


class RoundedAdamW(torch.optim.Optimizer):
    """torch's fused AdamW on float32 weights; between steps both moments are in bfloat16.

    They are rounded up or down by chance, in proportion to how near each is: to the nearest, a
    second moment that falls by a thousandth a step (beta 0.999) would never fall, as bfloat16's
    numbers are eight thousandths apart. What chance does depends on the step and the place in a
    rank's slice alone, so that a step made again is the same.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        moments: torch.dtype,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "moments": moments})
        self._step_supports_amp_scaling = True
        self.grad_scale: Tensor | None = None
        """Gradients are divided by it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(weight, dtype=group["moments"])
                state["step"] += 1
                self._update(weight, state, group)

    def _update(self, weight: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        tensors = [weight, weight.grad, state["exp_avg"], state["exp_avg_sq"]]
        flat = [local(tensor.detach()).view(-1) for tensor in tensors]
        for first, (value, gradient, *kept) in _parts(flat):
            first_moment, second_moment = (moment.float() for moment in kept)
            torch._fused_adamw_(
                [value],
                [gradient],
                [first_moment],
                [second_moment],
                [],
                [state["step"]],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=self.grad_scale,
            )
            kept[0].copy_(rounded(first_moment, 2 * state["step"], first))
            kept[1].copy_(rounded(second_moment, 2 * state["step"] + 1, first))


def _parts(flat: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    for first in range(0, flat[0].numel(), PART):
        yield first, [tensor[first : first + PART] for tensor in flat]


def rounded(values: Tensor, turn: Tensor, first: int = 0) -> Tensor:
    """float32 whose lower 16 bits are zero: each value's neighbour below or above in bfloat16, in
    the mean over turns the value itself. first: the number of the first value.
    """
    number = torch.arange(first, first + values.numel(), device=values.device)
    noise = number * 0x9E3779B1 + turn.long() * 0x85EBCA6B
    noise = (noise ^ (noise >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF
    noise = (noise ^ (noise >> 12)) & 0xFFFF
    bits = values.contiguous().view(torch.int32) + noise.int()
    return (bits & -0x10000).view(torch.float32)
