"""Losses: functions from what is known of each trained token to a number per token.

A loss names what it reads: `new_logprobs` (the trainer's, with gradient), `logprobs` (the generator's), any
numeric column (one number per rollout stands for each of its tokens; a list is read token by token), and
`mask`, `entropy`, `rollout_index`, which the trainer computes. Parameters with defaults are knobs. All
arrive as tensors [T] over the trained tokens of a micro-batch, end to end (`mask` is true throughout). It
returns a tensor [T], which the trainer sums and divides by the tokens or rollouts of the whole step; or a
single number, taken as the mean over the T tokens it was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def aipo(new_logprobs: Tensor, logprobs: Tensor, advantage: Tensor, rho: float = 4.0) -> Tensor:
    """Policy gradient weighted by the importance ratio, capped at `rho` from above (arXiv 2505.24034).

    The gradient is  min(pi / mu, rho) * A * grad log pi  token by token: the weight is a constant under
    differentiation, so a truncated token still pushes, with rho * A. Assumes that `logprobs` are those of the
    distribution each token was really sampled from, and an advantage without division by the deviation.
    """
    weight = (new_logprobs.detach() - logprobs).exp().clamp(max=rho)
    return -weight * advantage * new_logprobs


def grpo(
    new_logprobs: Tensor, logprobs: Tensor, advantage: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """Clipped surrogate of the ratio new / old (PPO, arXiv 1707.06347 eq. 7; GRPO, arXiv 2402.03300 eq. 3).

    The objective is  min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A),  without GRPO's KL term to a
    reference: a token whose ratio has left the interval in the direction that A favours gets no gradient.
    Assumes `logprobs` of the policy before the update, and `normalized_advantage`. GRPO's mean over
    rollouts of each rollout's mean is the trainer's normalize="rollout_means".
    """
    ratio = (new_logprobs - logprobs).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -(ratio * advantage).minimum(clipped * advantage)
