"""Policy gradients under a truncated importance weight: every token keeps its gradient, some with a
smaller weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from operators.losses.declared import loss
from operators.losses.per_rollout import ratio_of

if TYPE_CHECKING:
    from torch import Tensor


@loss
def aipo(new_logprobs: Tensor, logprobs: Tensor, advantage: Tensor, rho: float = 4.0) -> Tensor:
    """Policy gradient weighted by the importance ratio, capped at `rho` from above (arXiv
    2505.24034).

    The gradient is  min(pi / mu, rho) * A * grad log pi  token by token: the weight is a constant
    under differentiation, so a truncated token still pushes, with rho * A. Assumes that `logprobs`
    are those of the distribution each token was really sampled from, and an advantage without
    division by the deviation (`credit.advantage`). Any normalize.
    """
    weight = ratio_of(new_logprobs.detach() - logprobs).clamp(max=rho)
    return -weight * advantage * new_logprobs


@loss
def aipo_surrogate(
    new_logprobs: Tensor, logprobs: Tensor, advantage: Tensor, rho: float = 4.0
) -> Tensor:
    """The surrogate  min(pi / mu, rho) * A,  differentiated: truncated tokens have no gradient at
    all.

    It goes by the name of AIPO in some code, but it is another estimator than that of arXiv
    2505.24034: there, a token with a ratio above `rho` pushes with rho * A; here it is silent,
    whatever the sign of A. Below `rho` both have the same gradient. Assumes what `aipo` assumes.
    """
    return -ratio_of(new_logprobs - logprobs).clamp(max=rho) * advantage


@loss
def cispo(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantage: Tensor,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Tensor:
    """Policy gradient whose importance weight is clipped and held constant (CISPO, arXiv 2506.13585
    eq. 4).

    The gradient is  clip(r, 1 - clip_low, 1 + clip_high) * A * grad log pi : no token loses its
    gradient. The paper bounds the weight from above alone, as clip_low=1 does. Assumes
    `normalized_advantage`; the paper divides by the tokens of a group's rollouts
    (normalize="tokens", over the whole step).
    """
    ratio = ratio_of(new_logprobs.detach() - logprobs)
    return -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage * new_logprobs
