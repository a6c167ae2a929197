"""PPO's clipped objective, the algorithms that differ in its bounds, in credit, in what has a ratio
and in what the sum is divided by, and its critic's loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from operators.losses.declared import loss
from operators.losses.per_rollout import mean_per_rollout, ratio_of

if TYPE_CHECKING:
    from torch import Tensor


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """The objective to be maximised:  min(r * A, clip(r, 1 - low, 1 + high) * A)  (arXiv 1707.06347
    eq. 7).

    A token whose ratio has left the interval in the direction that A favours has no gradient.
    """
    return (ratio * advantage).minimum(ratio.clamp(1.0 - low, 1.0 + high) * advantage)


@loss
def ppo(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantage: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """PPO's policy loss (arXiv 1707.06347 eq. 7).

    Assumes `logprobs` of the policy before the update, an advantage per token from `credit.gae`
    over a critic's values (trained with `value_loss`), whitened over the step
    (Trainer(whiten=True)), and normalize="tokens". A KL penalty is in the reward:
    `credit.token_rewards` and `credit.token_gae`.
    """
    return -clipped(ratio_of(new_logprobs - logprobs), advantage, clip_low, clip_high)


@loss
def grpo(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantage: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Clipped objective with the group as the baseline (GRPO, arXiv 2402.03300 eq. 3, without its
    KL term).

    Assumes `logprobs` of the policy before the update, `normalized_advantage`, and
    normalize="rollout_means": the mean over rollouts of each rollout's mean. The paper's KL term is
    `with_kl(grpo, beta=0.04)`.
    """
    return -clipped(ratio_of(new_logprobs - logprobs), advantage, clip_low, clip_high)


@loss
def dr_grpo(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantage: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_tokens: int = 1024,
) -> Tensor:
    """GRPO without its two biases, towards long wrong answers and towards easy or hard prompts
    (arXiv 2503.20783).

    Each rollout's sum is divided by a constant, not by its length, and rewards not by their
    deviation. Assumes `logprobs` of the policy before the update, `credit.advantage` and
    normalize="rollouts". max_tokens: the constant, which is the length a completion may have.
    """
    return -clipped(ratio_of(new_logprobs - logprobs), advantage, clip_low, clip_high) / max_tokens


@loss
def dapo(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantage: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Tensor:
    """Clip-higher: more room for unlikely tokens to become likely (DAPO, arXiv 2503.14476 eq. 8).

    Assumes `logprobs` of the policy before the update, `normalized_advantage` and
    normalize="tokens", its mean over all tokens. Its other two parts are no part of the loss: a
    @keep filter that drops groups without signal, and a penalty for overlong answers in the reward.
    """
    return -clipped(ratio_of(new_logprobs - logprobs), advantage, clip_low, clip_high)


@loss
def reinforce_plus_plus(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantage: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Clipped objective without critic or group baseline (REINFORCE++, arXiv 2501.03262).

    Assumes `logprobs` of the policy before the update, the advantage of `credit.reward_to_go` over
    `credit.token_rewards` (KL in the reward), normalised over the whole step by
    Trainer(whiten=True), and normalize="tokens". Its variant with a baseline takes
    `credit.advantage` instead, whitened the same.
    """
    return -clipped(ratio_of(new_logprobs - logprobs), advantage, clip_low, clip_high)


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
