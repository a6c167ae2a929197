"""On-policy distillation: the policy's own tokens, judged by a teacher's log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from operators.losses.declared import loss
from operators.losses.per_rollout import ratio_of

if TYPE_CHECKING:
    from torch import Tensor


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
