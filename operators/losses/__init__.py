"""Losses: functions from what is known of each trained token to a number per token.

A loss names what it reads: `new_logprobs` (the trainer's, with gradient; a critic's is
`new_values`), `logprobs` (the generator's), any numeric column (one number per rollout stands for
each of its tokens; a list is read token by token), and `mask`, `entropy`, `rollout_index`,
`group_index`, which the trainer computes. Parameters with defaults are knobs: set them with
functools.partial. All arrive as tensors [T] over the trained tokens of a micro-batch, end to end
(`mask` is true throughout). It returns a tensor [T], which the trainer sums and divides by the
tokens or rollouts of the whole step; or a single number, taken as the mean over the T tokens it was
given.

A loss of whole rollouts puts a rollout's number at each of its tokens, so that
Trainer(normalize="rollout_means") makes the mean over rollouts of it. `plus`, `with_kl`,
`with_entropy` and `one_update` make losses of losses.
"""

from operators.losses.clipped import dapo, dr_grpo, grpo, gspo, ppo, reinforce_plus_plus, value_loss
from operators.losses.combined import (
    corrected_kl,
    entropy_bonus,
    kl_to_reference,
    one_update,
    plus,
    with_entropy,
    with_kl,
)
from operators.losses.preference import dpo
from operators.losses.proximal import decoupled_ppo, icepop, sequence_truncated_is, truncated_is
from operators.losses.weighted import aipo, aipo_surrogate, cispo, distill, rloo, sft

__all__ = [
    "aipo",
    "aipo_surrogate",
    "cispo",
    "corrected_kl",
    "dapo",
    "decoupled_ppo",
    "distill",
    "dpo",
    "dr_grpo",
    "entropy_bonus",
    "grpo",
    "gspo",
    "icepop",
    "kl_to_reference",
    "one_update",
    "plus",
    "ppo",
    "reinforce_plus_plus",
    "rloo",
    "sequence_truncated_is",
    "sft",
    "truncated_is",
    "value_loss",
    "with_entropy",
    "with_kl",
]
