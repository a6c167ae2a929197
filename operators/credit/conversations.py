"""Credit of each conversation of an episode: how much better it did than comparable ones."""

import numpy as np

from dataflow.records import AnyArray, Array
from dataflow.scorer import scorer
from operators.credit.groups import are_equal


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
