"""Policy gradients under a truncated importance weight, where every token keeps its gradient, some
with a smaller weight; and under none.
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


@loss
def distill(
    new_logprobs: Tensor, logprobs: Tensor, teacher_logprobs: Tensor, rho: float = 4.0
) -> Tensor:
    """Reverse KL to a teacher, estimated at the drawn tokens (GKD, arXiv 2306.13649; MiniLLM, arXiv
    2306.08543).

    The gradient of  KL(pi || teacher)  at a prefix is the mean of  (log pi - log teacher) * grad
    log pi  over tokens drawn from pi: a policy gradient whose advantage is how much likelier the
    teacher finds the token. It looks at each token by itself, not at what comes of it. Tokens of an
    older policy are weighted as in `aipo`, up to `rho`. Assumes `teacher_logprobs` from Logprobs on
    the teacher, at the temperature of sampling and over the whole vocabulary, and no reward. Any
    normalize; "tokens" makes it the KL per token.
    """
    weight = ratio_of(new_logprobs.detach() - logprobs).clamp(max=rho)
    return -weight * (teacher_logprobs - new_logprobs.detach()) * new_logprobs


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
