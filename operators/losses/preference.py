"""Online DPO: the best of a group is preferred to its worst."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from operators.credit import ROUNDING
from operators.losses.declared import loss
from operators.losses.per_rollout import sum_per_rollout, total

if TYPE_CHECKING:
    from torch import Tensor


@loss
def dpo(
    new_logprobs: Tensor,
    ref_logprobs: Tensor,
    reward: Tensor,
    rollout_index: Tensor,
    group_index: Tensor,
    beta: float = 0.1,
) -> Tensor:
    """Direct preference optimisation on pairs that the policy has just made (arXiv 2305.18290;
    online, 2402.04792).

    -log sigmoid(beta * (m(best) - m(worst))),  where m sums log pi - log ref over a rollout, and
    best and worst are by `reward` (the earlier one of equals). Needs no credit rule. Assumes one
    reward per rollout, `ref_logprobs` of the policy at the start, and normalize="rollout_means":
    both rollouts of a pair carry its loss, times half the group's rollouts, so that the step's loss
    is the mean over groups. A group of equal rewards counts as 0.
    """
    from torch.nn.functional import logsigmoid

    best_T = _is_chosen(reward, rollout_index, group_index)
    worst_T = _is_chosen(-reward, rollout_index, group_index)
    sign_T = best_T.to(reward.dtype) - worst_T.to(reward.dtype)
    margin_G = total(sign_T * (new_logprobs - ref_logprobs), group_index)
    rollouts_G = total(
        1.0 / sum_per_rollout(reward.new_ones(len(reward)), rollout_index), group_index
    )
    losses_G = -0.5 * rollouts_G * logsigmoid(beta * margin_G)
    return losses_G[group_index] * sign_T.abs()


def _is_chosen(score: Tensor, rollout_index: Tensor, group_index: Tensor) -> Tensor:
    """Whether each token [T] belongs to its group's first rollout of the highest score, up to
    rounding.
    """
    from torch import finfo

    most_T = score.new_full(score.shape, -math.inf).scatter_reduce(0, group_index, score, "amax")[
        group_index
    ]
    rounding = max(ROUNDING, 4 * finfo(score.dtype).eps)
    candidate_T = rollout_index.where(score >= most_T - rounding * most_T.abs(), len(score))
    first_T = candidate_T.new_full(score.shape, len(score)).scatter_reduce(
        0, group_index, candidate_T, "amin"
    )
    return rollout_index == first_T[group_index]
