"""Whether a loss lets rollouts of advantage 0 be left out; imports torch."""

from __future__ import annotations

import torch
from torch import Tensor

from operators.training.learner.loss_function import LossFunction


def vanishes_without_advantage(loss: LossFunction) -> bool:
    """Whether rollouts of advantage 0 can be left out: they add exactly nothing to the loss and its
    gradient, and the other rollouts' part does not depend on them. Found by trying.

    False for losses with an entropy bonus, a KL term or a whitened advantage, for those that do not
    read the advantage, and for those that cannot be called on random numbers.
    """
    known = {"new_logprobs", "mask", "rollout_index"}
    if (
        "advantage" not in loss.columns
        or "new_logprobs" not in loss.computed
        or not known.issuperset(loss.computed)
    ):
        return False
    draw = torch.Generator().manual_seed(0)
    given = {
        name: -3.0 * torch.rand(256, generator=draw) for name in (*loss.columns, "new_logprobs")
    }
    given["advantage"] = torch.randn(256, generator=draw)
    given["rollout_index"] = torch.arange(256) // 8
    silent_T = given["rollout_index"] % 2 == 0
    given["advantage"][silent_T] = 0.0
    try:
        total, grad = _tried(loss, given)
        some_total, some_grad = _tried(
            loss, {name: values[~silent_T] for name, values in given.items()}
        )
        none_total, none_grad = _tried(
            loss, {name: values[silent_T] for name, values in given.items()}
        )
    except Exception:  # a loss that needs real rows is simply computed on all of them
        return False
    if none_total.count_nonzero() or none_grad.count_nonzero() or grad[silent_T].count_nonzero():
        return False
    return torch.allclose(total, some_total, rtol=1e-4) and torch.allclose(
        grad[~silent_T], some_grad, rtol=1e-4
    )


def _tried(loss: LossFunction, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Summed loss and its gradient with respect to the log-probabilities."""
    new_T = given["new_logprobs"].clone().requires_grad_()
    arguments = {name: values for name, values in given.items() if name in loss.columns}
    if "mask" in loss.computed:
        arguments["mask"] = torch.ones(len(new_T), dtype=torch.bool)
    if "rollout_index" in loss.computed:
        arguments["rollout_index"] = torch.unique(given["rollout_index"], return_inverse=True)[1]
    total = loss.call(new_logprobs=new_T, **arguments).expand(new_T.shape).sum()
    (grad,) = torch.autograd.grad(total, new_T)
    return total.detach(), grad
