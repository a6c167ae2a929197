"""GSPO: the clipped objective with one ratio for a whole rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from operators.losses.clipped import clipped
from operators.losses.declared import loss
from operators.losses.per_rollout import mean_per_rollout, ratio_of

if TYPE_CHECKING:
    from torch import Tensor


@loss
def gspo(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantage: Tensor,
    rollout_index: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """Clipped objective of the sequence ratio  exp(mean over tokens of log r)  (GSPO, arXiv
    2507.18071 eq. 5 to 7).

    All tokens of a rollout are clipped together; as the ratio is normalised by length, its bounds
    are narrow (the defaults are the paper's). Assumes `logprobs` of the policy before the update,
    `normalized_advantage` and normalize="rollout_means".
    """
    ratio = ratio_of(mean_per_rollout(new_logprobs - logprobs, rollout_index))
    return -clipped(ratio, advantage, clip_low, clip_high)
