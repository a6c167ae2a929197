"""Clipped objectives around a proximal policy, weighted by how the generator differs from it.

Three policies: the one that is trained (`new_logprobs`), the proximal one that clipping holds it
near (`proximal_logprobs`, a column: Logprobs over weights that are newer than the generator's, or
the same in the trainer's precision), and the one that drew the tokens (`logprobs`). The objective's
ratio is new / proximal; the weight proximal / generator is a constant. `one_update(loss)` takes the
trainer's own weights as the proximal ones.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from operators.losses.clipped import clipped
from operators.losses.declared import loss
from operators.losses.per_rollout import ratio_of, sum_per_rollout

if TYPE_CHECKING:
    from torch import Tensor


@loss
def decoupled_ppo(
    new_logprobs: Tensor,
    proximal_logprobs: Tensor,
    logprobs: Tensor,
    advantage: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = math.inf,
) -> Tensor:
    """PPO that may train on stale rollouts: clipped around a recent policy, not around theirs.

    AReaL, arXiv 2505.24298 eq. 5, after arXiv 2110.00641. Assumes a proximal policy newer than the
    generator's (the paper's is the one before the update), `credit.advantage` or gae, and
    normalize="tokens". cap: of the weight proximal / generator; the paper has none.
    """
    weight = ratio_of(proximal_logprobs - logprobs).clamp(max=cap)
    return -weight * clipped(
        ratio_of(new_logprobs - proximal_logprobs), advantage, clip_low, clip_high
    )


@loss
def truncated_is(
    new_logprobs: Tensor,
    proximal_logprobs: Tensor,
    logprobs: Tensor,
    advantage: Tensor,
    cap: float = 2.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Each token weighted by  min(proximal / generator, cap) : for engines whose numbers differ
    from the trainer's.

    Truncated importance sampling (Ionides 2008) as Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training", put it before the clipped objective. Assumes
    proximal log-probabilities of the generator's weights in the trainer's precision, and the credit
    and normalize of the clipped loss that it stands for.
    """
    weight = ratio_of(proximal_logprobs - logprobs).clamp(max=cap)
    return -weight * clipped(
        ratio_of(new_logprobs - proximal_logprobs), advantage, clip_low, clip_high
    )


@loss
def sequence_truncated_is(
    new_logprobs: Tensor,
    proximal_logprobs: Tensor,
    logprobs: Tensor,
    advantage: Tensor,
    rollout_index: Tensor,
    cap: float = 2.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Each rollout weighted by  min(product of proximal / generator over its tokens, cap).

    Unbiased up to the cap, where the weight per token leaves out how likely the prefix was; its
    variance grows with length. Otherwise as `truncated_is` (Yao et al. 2025), and with the same
    assumptions.
    """
    weight = ratio_of(sum_per_rollout(proximal_logprobs - logprobs, rollout_index)).clamp(max=cap)
    return -weight * clipped(
        ratio_of(new_logprobs - proximal_logprobs), advantage, clip_low, clip_high
    )


@loss
def icepop(
    new_logprobs: Tensor,
    proximal_logprobs: Tensor,
    logprobs: Tensor,
    advantage: Tensor,
    least: float = 0.5,
    most: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Masked importance sampling: a token whose weight is out of [least, most] is left out (arXiv
    2510.18855).

    Within the interval a token is weighted by proximal / generator; outside, the two disagree too
    much for it to be of use, and it has neither value nor gradient (it still counts in what the sum
    is divided by). The paper names the bounds alpha and beta. Assumes what `truncated_is` assumes;
    the paper's credit is `normalized_advantage`.
    """
    ratio = ratio_of(proximal_logprobs - logprobs)
    weight = ratio.where((ratio >= least) & (ratio <= most), 0.0)
    return -weight * clipped(
        ratio_of(new_logprobs - proximal_logprobs), advantage, clip_low, clip_high
    )
