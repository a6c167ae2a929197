"""Credit: how much better each rollout, or each of its tokens, did than was to be expected, as
scorers.
"""

import numpy as np

from dataflow.records import AnyArray, Array
from dataflow.scorer import scorer

__all__ = [
    "advantage",
    "conversation_advantage",
    "gae",
    "leave_one_out",
    "normalized_advantage",
    "reward_to_go",
    "token_gae",
    "token_rewards",
    "turn_rewards",
]

ROUNDING = 1e-9
"""Numbers that differ by no more than this share of the largest of them are equal: what computing
leaves is no signal. The one rule of credit, filters, whitening and figures."""


def are_equal(values: Array) -> bool:
    """Whether numbers [n] differ by nothing but rounding.

    >>> import numpy as np
    >>> are_equal(np.array([0.3, 0.1 + 0.2])), are_equal(np.array([0.0, 1e-12]))
    (True, False)
    """
    return not len(values) or bool(np.ptp(values) <= ROUNDING * np.max(np.abs(values)))


def centred(values: Array) -> Array:
    """Minus their mean; 0 where they are equal."""
    return np.zeros(len(values)) if are_equal(values) else np.asarray(values - np.mean(values))


@scorer(per="group", isolate=False)
def advantage(reward: Array) -> Array:
    """How much better each rollout did than its siblings: reward minus their mean (arXiv
    2505.24034).

    No division by the standard deviation, which would weigh groups by how rarely they differ (Dr.
    GRPO, arXiv 2503.20783). reward: [rollouts of a group without error].

    >>> import numpy as np
    >>> advantage(np.array([1.0, 0.0, 0.0, 1.0])).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    return centred(reward)


@scorer(per="group", isolate=False, name="advantage")
def normalized_advantage(reward: Array, epsilon: float = 1e-4) -> Array:
    """GRPO's: reward minus the mean, divided by the group's standard deviation (arXiv 2402.03300).

    The deviation is that of the sample (n - 1 below the root); a group of equal rewards has
    advantage 0. reward: [rollouts of a group without error]. epsilon: added to the deviation.

    >>> import numpy as np
    >>> normalized_advantage(np.array([1.0, 0.0, 0.0, 1.0])).round(2).tolist()
    [0.87, -0.87, -0.87, 0.87]
    """
    if are_equal(reward):
        return np.zeros(len(reward))
    return np.asarray(centred(reward) / (np.std(reward, ddof=1) + epsilon))


@scorer(per="group", isolate=False, name="advantage")
def leave_one_out(reward: Array) -> Array:
    """RLOO's: reward minus the mean of the other rollouts' (arXiv 2402.14740).

    The baseline does not depend on the rollout itself, which makes the estimate unbiased: n / (n -
    1) times `advantage`. A rollout alone has advantage 0. reward: [rollouts of a group without
    error].

    >>> import numpy as np
    >>> leave_one_out(np.array([1.0, 0.0, 0.0])).tolist()
    [1.0, -0.5, -0.5]
    """
    siblings = max(1, len(reward) - 1)
    return np.asarray(centred(reward) * (len(reward) / siblings))


# Credit of each conversation of an episode: how much better it did than comparable ones.


@scorer(per="group", isolate=False, name="advantage")
def conversation_advantage(
    turn: list[Array],
    turn_reward: list[Array],
    training_row: list[Array],
    row_conversation: list[Array],
    row_role: list[list[str]],
    row_branch_turn: list[Array],
    mask: list[Array],
) -> list[Array]:
    """How much better each conversation of an episode did than comparable ones.

    The value of a conversation is the sum of its turns' rewards, and the mean value of its branches
    where it has any. A branch is compared with those that began where it did (the local advantage
    of TreeRL, arXiv 2506.11902), any other conversation with those of the same role in all rollouts
    of the group. Each chosen token has its conversation's advantage; 0 where the mask is false.

    >>> import numpy as np
    >>> rows = dict(training_row=[np.array([0, 0, 1])] * 2, row_conversation=[np.array([0, 1])] * 2)
    >>> rows |= dict(row_role=[["white", "black"]] * 2, row_branch_turn=[np.array([-1, -1])] * 2)
    >>> rows |= dict(turn=[np.array([-1, 0, 1])] * 2, mask=[np.array([0, 1, 1])] * 2)
    >>> rows |= dict(turn_reward=[np.array([0.0, 1.0, -1.0]), np.array([0.0, 0.0, 1.0])])
    >>> [advantage.tolist() for advantage in conversation_advantage(**rows)]
    [[0.0, 0.5, -1.0], [0.0, -0.5, 1.0]]
    """
    owners_S, compared, values = [], [], []
    alike: dict[object, list[float]] = {}
    rollouts = zip(
        turn, turn_reward, training_row, row_conversation, row_role, row_branch_turn, strict=True
    )
    for number, (turns_S, rewards_S, rows_S, owners, roles, branch_turns) in enumerate(rollouts):
        owner_S = np.asarray(owners, np.int64)[np.asarray(rows_S, np.int64)]
        by_owner = _conversation_values(
            np.asarray(turns_S), np.asarray(rewards_S, np.float64), owner_S, owners, branch_turns
        )
        begun = {
            int(owner): (role, int(at))
            for owner, role, at in zip(owners, roles, branch_turns, strict=True)
        }
        keys = {owner: (number, at) if at >= 0 else role for owner, (role, at) in begun.items()}
        for owner, value in by_owner.items():
            alike.setdefault(keys[owner], []).append(value)
        owners_S.append(owner_S)
        compared.append(keys)
        values.append(by_owner)
    means = {
        key: float(np.mean(group)) for key, group in alike.items() if not are_equal(np.array(group))
    }
    by_rollout = []
    for owner_S, keys, by_owner, chosen in zip(owners_S, compared, values, mask, strict=True):
        advantages = {
            owner: value - means.get(keys[owner], value) for owner, value in by_owner.items()
        }
        of_S = [advantages[owner] for owner in owner_S.tolist()]
        by_rollout.append(np.where(np.asarray(chosen, bool), of_S, 0.0))
    return by_rollout


def _conversation_values(
    turns_S: AnyArray, rewards_S: AnyArray, owner_S: AnyArray, owners: Array, branch_turns: Array
) -> dict[int, float]:
    """The value of each conversation of a rollout; see `conversation_advantage`."""
    owner_of = dict(zip(turns_S.tolist(), owner_S.tolist(), strict=True))
    parents = {
        int(owner): owner_of.get(int(at)) if at >= 0 else None
        for owner, at in zip(owners, branch_turns, strict=True)
    }
    values_by_owner: dict[int, float] = {}
    # branches have higher numbers than what they go on from
    for owner in sorted(parents, reverse=True):
        below = [value for child, value in values_by_owner.items() if parents[child] == owner]
        values_by_owner[owner] = float(rewards_S[owner_S == owner].sum()) + (
            float(np.mean(below)) if below else 0.0
        )
    return values_by_owner


# Credit of each token: rewards at tokens, and how much better than expected it went on from each
# of them.


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
