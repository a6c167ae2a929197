"""Credit of each token: rewards at tokens, and how much better than expected it went on from each
of them.
"""

import numpy as np

from dataflow.records import Array
from dataflow.scorer import scorer


@scorer(isolate=False, name="token_rewards")
def turn_rewards(reward: float, turn_reward: Array, mask: Array) -> Array:
    """What an episode gave for each turn, at its last token, and the reward at the last token of
    all.

    Before `token_gae` or `reward_to_go`, as `token_rewards` is. turn_reward, mask: per token. A
    number per token, 0 where the mask is false.

    >>> import numpy as np
    >>> turn_rewards(1.0, np.array([0.0, 0.5, 0.0, 0.25]), np.array([0, 1, 0, 1])).tolist()
    [0.0, 0.5, 0.0, 1.25]
    """
    rewards = np.where(np.asarray(mask, bool), np.asarray(turn_reward, np.float64), 0.0)
    rewards[np.flatnonzero(mask)[-1:]] += reward
    return rewards


@scorer(isolate=False)
def token_rewards(
    reward: float, logprobs: Array, ref_logprobs: Array, mask: Array, beta: float = 0.05
) -> Array:
    """KL in the reward: minus beta * (log pi - log ref) at each chosen token, and the reward at the
    last of them.

    As PPO and REINFORCE++ do it (arXiv 1909.08593 eq. 2; arXiv 2501.03262). log pi is the
    generator's. logprobs, ref_logprobs, mask: per token. Returns a number per token, 0 where the
    mask is false.

    >>> import numpy as np
    >>> mask = np.array([0, 1, 1])
    >>> logprobs, ref_logprobs = np.array([0.0, -1.0, -2.0]), np.array([0.0, -2.0, -4.0])
    >>> token_rewards(1.0, logprobs, ref_logprobs, mask, beta=0.1).round(2).tolist()
    [0.0, -0.1, 0.8]
    """
    chosen = np.asarray(mask, bool)
    drift = np.asarray(logprobs, np.float64) - np.asarray(ref_logprobs, np.float64)
    rewards = np.where(chosen, -beta * drift, 0.0)
    rewards[np.flatnonzero(chosen)[-1:]] += reward
    return rewards


@scorer(isolate=False, name="advantage")
def gae(reward: float, values: Array, mask: Array, gamma: float = 1.0, lam: float = 0.95) -> Array:
    """Generalised advantage estimation with the reward at the last chosen token (arXiv 1506.02438
    eq. 16).

    A_t = d_t + gamma * lam * A_{t+1},  d_t = r_t + gamma * V_{t+1} - V_t,  over the chosen tokens
    alone: what the environment wrote between two of them takes no time. The rollout ends after its
    last one, whatever ended it, with value 0. values: the critic's, of the prefix before each
    token. Returns a number per token, 0 where the mask is false.

    >>> import numpy as np
    >>> gae(1.0, np.array([0.0, 0.5, 0.75]), np.array([0, 1, 1]), lam=1.0).tolist()
    [0.0, 0.5, 0.25]
    """
    rewards = np.zeros(len(mask))
    rewards[np.flatnonzero(mask)[-1:]] = reward
    return _estimate(rewards, values, mask, gamma, lam)


@scorer(isolate=False, name="advantage")
def token_gae(
    token_rewards: Array, values: Array, mask: Array, gamma: float = 1.0, lam: float = 0.95
) -> Array:
    """`gae` with a reward at each token: of `token_rewards`, or any column of that name.

    >>> import numpy as np
    >>> rewards, values = np.array([0.0, 0.0, 1.0]), np.array([0.0, 0.5, 0.75])
    >>> token_gae(rewards, values, np.array([0, 1, 1]), lam=0.0).tolist()
    [0.0, 0.25, 0.25]
    """
    return _estimate(token_rewards, values, mask, gamma, lam)


@scorer(isolate=False, name="advantage")
def reward_to_go(token_rewards: Array, mask: Array, gamma: float = 1.0) -> Array:
    """REINFORCE++'s: the sum of the rewards from each token on, discounted by gamma (arXiv
    2501.03262).

    It is centred and scaled over the step by Trainer(whiten=True). Returns a number per token, 0
    where the mask is false.

    >>> import numpy as np
    >>> reward_to_go(np.array([0.0, -1.0, 2.0]), np.array([0, 1, 1])).tolist()
    [0.0, 1.0, 2.0]
    """
    return _estimate(token_rewards, np.zeros(len(mask)), mask, gamma, 1.0)


def _estimate(rewards: Array, values: Array, mask: Array, gamma: float, lam: float) -> Array:
    """GAE over the chosen tokens; [tokens], 0 at the others."""
    chosen = np.flatnonzero(mask)
    values_C = np.asarray(values, np.float64)[chosen]
    next_C = np.append(values_C, 0.0)[1:]
    surprise_C = np.asarray(rewards, np.float64)[chosen] + gamma * next_C - values_C
    advantages = np.zeros(len(mask))
    running = 0.0
    for token, surprise in zip(chosen[::-1].tolist(), surprise_C[::-1].tolist(), strict=True):
        running = surprise + gamma * lam * running
        advantages[token] = running
    return advantages
