"""Losses without a ratio: REINFORCE with a leave-one-out baseline, and supervised learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from operators.losses.declared import loss

if TYPE_CHECKING:
    from torch import Tensor


@loss
def rloo(new_logprobs: Tensor, advantage: Tensor) -> Tensor:
    """The score function  A * grad log pi  (RLOO, arXiv 2402.14740; REINFORCE, Williams 1992).

    Assumes `credit.leave_one_out`, normalize="rollouts", and rollouts of the very policy that is
    trained (max_staleness=0): it corrects for nothing. With older rollouts take `aipo` with the
    same credit.
    """
    return -advantage * new_logprobs


@loss
def sft(new_logprobs: Tensor) -> Tensor:
    """Supervised learning: minus the log-probability of each token that the mask marks.

    Assumes nothing of how the tokens came about; normalize="tokens" makes it the cross-entropy.
    """
    return -new_logprobs
