"""The critic's loss: squared distance of its values to what they should have been."""

from __future__ import annotations

from typing import TYPE_CHECKING

from operators.losses.declared import loss

if TYPE_CHECKING:
    from torch import Tensor


@loss
def value_loss(
    new_values: Tensor, values: Tensor, advantage: Tensor, clip: float | None = 0.2
) -> Tensor:
    """Half the squared error of the values, as PPO's implementations train a critic (arXiv
    1707.06347 eq. 9).

    The target is  values + advantage,  which for `credit.gae` is the lambda-return (arXiv
    1506.02438). For a Trainer on a Model with head="value", with the policy's unwhitened advantages
    and normalize="tokens". values: of the critic that the advantages were made with. clip: the
    worse of the errors with and without the change of a value bounded to this much, so that a value
    which has gone so far has no gradient; None: no bound.
    """
    target = values + advantage
    error = (new_values - target).square()
    if clip is not None:
        bounded = values + (new_values - values).clamp(-clip, clip)
        error = error.maximum((bounded - target).square())
    return 0.5 * error
