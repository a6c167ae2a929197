"""Laws of credit: advantages of a group add up to nothing; GAE is what its definition says."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_rig import gradient, group, rows_of, tiny_learner, tiny_trainer

from dataflow.records import ERROR, GROUP_ID, TOKEN_NUMBERS
from dataflow.runtime import Batch, Context
from operators.credit import (
    advantage,
    conversation_advantage,
    gae,
    leave_one_out,
    normalized_advantage,
    reward_to_go,
    token_gae,
    token_rewards,
    turn_rewards,
)
from operators.filters import has_signal
from operators.training.learner.rows import step_rows, whitened

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 0.5])


def test_the_advantage_is_the_reward_above_the_groups_mean():
    assert np.allclose(advantage(REWARDS), [0.5, -0.5, -0.5, 0.5, 0.0], atol=1e-12)


def test_advantages_of_a_group_add_up_to_zero():
    for rule in (advantage, normalized_advantage):
        assert abs(rule(REWARDS).sum()) < 1e-12


def test_the_normalized_advantage_does_not_change_with_the_rewards_unit():
    found = normalized_advantage(REWARDS, epsilon=0.0)
    assert np.allclose(found, normalized_advantage(100 * REWARDS, epsilon=0.0), atol=1e-12)
    assert np.isclose(np.std(found, ddof=1), 1.0)
    assert not np.allclose(advantage(REWARDS), advantage(100 * REWARDS))


EQUAL = [
    np.full(7, 0.1),
    np.ones(1),
    np.full(5, 1e6 + 0.1),
    np.array([0.3, 0.1 + 0.2, 0.3]),
    np.zeros(4),
]


@pytest.mark.parametrize("rewards", EQUAL, ids=str)
def test_rewards_that_differ_by_rounding_alone_give_no_advantage_and_no_signal(rewards):
    for rule in (
        advantage,
        normalized_advantage,
        normalized_advantage.configured(epsilon=0.0),
        leave_one_out,
    ):
        assert (rule(rewards) == 0).all()
    assert not has_signal(rewards)
    turns = [np.array([reward]) for reward in rewards]
    one = [np.array([0])] * len(rewards)
    apart = [np.array([-1])] * len(rewards)
    of_turns = conversation_advantage(
        one, turns, one, one, [["player"]] * len(rewards), apart, [np.array([1])] * len(rewards)
    )
    assert all((given == 0).all() for given in of_turns)


def test_small_differences_are_signal():
    for rewards in (np.array([0.0, 1e-12]), np.array([1.0, 1.0 + 1e-7]), np.array([1e9, 1e9 + 10])):
        assert has_signal(rewards) and (advantage(rewards) != 0).all()


def test_advantages_that_are_rounding_beside_the_rewards_are_no_signal_and_move_nothing_whitened():
    groups = [with_rewards(group(number, size=7), 0.1) for number in range(2)]
    rows = rows_of(*groups)
    assert not rows.signal_R.any() and not whitened(rows).columns_R["advantage"].any()
    learner = tiny_learner(tiny_trainer(whiten=True))
    assert not gradient(learner, rows)[1].any()
    level = [
        made.drop_columns(["advantage"]).append_column("advantage", made["reward"])
        for made in groups
    ]
    assert (
        rows_of(*level).signal_R.all()
        and not whitened(rows_of(*level)).columns_R["advantage"].any()
    )


def test_advantages_are_signal_beside_large_rewards_that_differ():
    made = group(0, size=2).drop_columns(["reward", "advantage"])
    rewards = np.array([1e10, 2e10])
    made = made.append_column("reward", pa.array(rewards))
    rows = rows_of(made.append_column("advantage", pa.array(normalized_advantage(rewards))))
    assert np.allclose(np.abs(rows.columns_R["advantage"]), 0.5**0.5) and rows.signal_R.all()


def with_rewards(batch, reward):
    """All with that reward, and with the advantage that a subtraction of the mean gives."""
    rewards = np.full(batch.num_rows, reward)
    batch = batch.drop_columns(["reward", "advantage"]).append_column("reward", pa.array(rewards))
    return batch.append_column("advantage", pa.array(rewards - rewards.mean()))


def test_both_rules_write_the_column_that_losses_read():
    assert advantage.name == normalized_advantage.name == "advantage"
    assert list(advantage.reads()) == list(normalized_advantage.reads()) == ["reward"]
    assert advantage.per == normalized_advantage.per == "group"


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9))
def test_leave_one_out_compares_each_rollout_with_the_others_alone(rewards):
    found = leave_one_out(np.array(rewards))
    for at, reward in enumerate(rewards):
        others = rewards[:at] + rewards[at + 1 :]
        assert abs(found[at] - (reward - sum(others) / len(others))) < 1e-12
    assert leave_one_out(np.array([3.0])).tolist() == [0.0]


@st.composite
def judged(draw):
    """Rewards, values and mask of a rollout whose environment speaks in between; arbitrary where it
    is not chosen.
    """
    mask = draw(st.lists(st.booleans(), min_size=1, max_size=12))
    numbers = st.lists(st.floats(-3, 3), min_size=len(mask), max_size=len(mask))
    return draw(numbers), draw(numbers), mask


def _backwards(rewards, values, mask, gamma, lam):
    """GAE from its definition: a discounted sum of temporal differences, with nothing shared
    between tokens.
    """
    chosen = [at for at, marked in enumerate(mask) if marked]
    found = [0.0] * len(mask)
    for first, at in enumerate(chosen):
        for later in range(first, len(chosen)):
            following = values[chosen[later + 1]] if later + 1 < len(chosen) else 0.0
            surprise = rewards[chosen[later]] + gamma * following - values[chosen[later]]
            found[at] += (gamma * lam) ** (later - first) * surprise
    return found


@given(judged(), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_discounted_sum_of_temporal_differences(rollout, gamma, lam):
    rewards, values, mask = rollout
    found = token_gae(np.array(rewards), np.array(values), np.array(mask), gamma=gamma, lam=lam)
    assert np.allclose(found, _backwards(rewards, values, mask, gamma, lam), rtol=1e-10, atol=1e-10)
    assert (found[~np.array(mask)] == 0).all()


@given(judged())
def test_gae_without_discounts_is_the_reward_to_go_minus_the_value(rollout):
    rewards, values, mask = (np.array(each) for each in rollout)
    to_go = reward_to_go(rewards, mask)
    found = token_gae(rewards, values, mask, gamma=1.0, lam=1.0)
    assert np.allclose(found, np.where(mask, to_go - values, 0.0), atol=1e-10)
    ahead = [rewards[at:][mask[at:]].sum() if mask[at] else 0.0 for at in range(len(mask))]
    assert np.allclose(to_go, ahead, atol=1e-10)


@given(judged())
def test_gae_with_lambda_zero_is_one_temporal_difference(rollout):
    rewards, values, mask = (np.array(each) for each in rollout)
    found = token_gae(rewards, values, mask, gamma=0.9, lam=0.0)[mask]
    following = np.append(values[mask][1:], 0.0)[: len(found)]
    assert np.allclose(found, rewards[mask] + 0.9 * following - values[mask], atol=1e-10)


@given(judged(), st.floats(-2, 2))
def test_gae_of_a_reward_puts_it_at_the_last_chosen_token(rollout, reward):
    _, values, mask = (np.array(each) for each in rollout)
    spread = np.zeros(len(mask))
    if mask.any():
        spread[np.flatnonzero(mask)[-1]] = reward
    found = gae(reward, values, mask, gamma=0.9, lam=0.8)
    assert np.allclose(found, token_gae(spread, values, mask, gamma=0.9, lam=0.8), atol=1e-12)


def test_a_perfect_critic_leaves_no_advantage():
    mask = np.array([False, True, True, False, True])
    assert np.allclose(gae(0.7, np.full(5, 0.7), mask), 0.0, atol=1e-12)


def test_token_rewards_charge_the_drift_from_the_reference_and_pay_the_reward_at_the_end():
    mask = np.array([False, True, False, True, False])
    logprobs, reference = (
        np.array([9.0, -1.0, 9.0, -2.0, 9.0]),
        np.array([0.0, -1.5, 0.0, -1.0, 0.0]),
    )
    found = token_rewards(2.0, logprobs, reference, mask, beta=0.1)
    assert np.allclose(found, [0.0, -0.05, 0.0, 0.1 + 2.0, 0.0], atol=1e-12)
    assert token_rewards(2.0, logprobs, reference, np.zeros(5, bool)).tolist() == [0.0] * 5


def test_rules_per_token_write_lists_that_the_trainer_reads_token_by_token():
    for rule in (gae, token_gae, reward_to_go):
        assert (rule.name, rule.per, rule.output) == ("advantage", "row", TOKEN_NUMBERS)
        assert not rule.isolate
    assert (token_rewards.name, token_rewards.output) == ("token_rewards", TOKEN_NUMBERS)


def test_rules_read_and_write_ragged_columns_of_a_stream_of_rows():
    lengths = [3, 1, 5, 2]
    draw = np.random.default_rng(0)
    masks = [[False] + [True] * (length - 1) for length in lengths]

    def ragged() -> list[list[float]]:
        return [np.where(mask, draw.normal(size=len(mask)), 0.0).tolist() for mask in masks]

    columns = {"logprobs": ragged(), "ref_logprobs": ragged(), "values": ragged()}
    batch = pa.RecordBatch.from_pydict(
        {
            GROUP_ID: pa.array([0, 0, 1, 1]),
            "reward": pa.array([1.0, 0.0, 0.5, 2.0]),
            "mask": pa.array(masks, pa.list_(pa.bool_())),
            ERROR: pa.array([None, None, "broken", None], pa.string()),
            **{name: pa.array(lists, TOKEN_NUMBERS) for name, lists in columns.items()},
        }
    )
    for made in (token_rewards.configured(beta=0.1), token_gae.configured(lam=0.5)):
        runtime = made.build(Context(node=made.name))
        runtime.push(Batch("prompts", batch, "values"))
        (done,) = runtime.work() or []
        batch = done.records
        assert not runtime.pending()
        runtime.close()
    assert batch.schema.field("advantage").type == TOKEN_NUMBERS
    assert batch.column(ERROR).to_pylist() == [None, None, "broken", None]
    rows = batch.to_pylist()
    assert rows[2]["advantage"] is None
    assert rows[1]["advantage"] == [0.0]
    for row in (rows[0], rows[1], rows[3]):
        given = [np.array(row[name]) for name in ("logprobs", "ref_logprobs", "mask")]
        wanted = token_gae(
            token_rewards(row["reward"], *given, beta=0.1),
            np.array(row["values"]),
            np.array(row["mask"]),
            lam=0.5,
        )
        assert np.allclose(row["advantage"], wanted, atol=1e-6)


def test_an_advantage_per_token_reaches_the_loss_at_its_own_token():
    batch = _with_values(group(1, size=3))
    runtime = gae.build(Context(node="advantage"))
    runtime.push(Batch("prompts", batch, "values"))
    (done,) = runtime.work() or []
    rows = step_rows([done.records], ("advantage", "values"))
    wanted = [
        gae(row["reward"], np.array(row["values"]), np.array(row["mask"])).astype(np.float32)
        for row in batch.to_pylist()
    ]
    assert np.allclose(rows.columns_S["advantage"], np.concatenate(wanted), atol=1e-6)
    assert rows.columns_S["advantage"][rows.tokens.mask].any()


def _with_values(batch: pa.RecordBatch) -> pa.RecordBatch:
    values = [
        [0.3 * at * chosen for at, chosen in enumerate(row["mask"])] for row in batch.to_pylist()
    ]
    return batch.drop_columns(["advantage"]).append_column(
        "values", pa.array(values, TOKEN_NUMBERS)
    )


def test_rewards_of_turns_stand_at_their_last_tokens_and_the_reward_at_the_last_of_all():
    mask, given = np.array([0, 1, 1, 0, 1, 0], bool), np.array([9.0, 0.0, 0.5, 9.0, 0.25, 0.0])
    assert turn_rewards(1.0, given, mask).tolist() == [0.0, 0.0, 0.5, 0.0, 1.25, 0.0]
    assert (turn_rewards.name, turn_rewards.output) == ("token_rewards", TOKEN_NUMBERS)
    assert reward_to_go(turn_rewards(1.0, given, mask), mask).tolist() == [
        0.0,
        1.75,
        1.75,
        0.0,
        1.25,
        0.0,
    ]


def _conversations(tree):
    """One rollout whose conversations say one turn each, of one token behind one that is given.

    tree: by conversation its role, the turn behind which it branched off, and its reward.
    """
    numbers = {owner: at for at, owner in enumerate(tree)}
    return {
        "turn": np.array([each for at in numbers.values() for each in (-1, at)]),
        "turn_reward": np.array([each for _, _, reward in tree.values() for each in (0.0, reward)]),
        "training_row": np.repeat(np.arange(len(tree)), 2),
        "row_conversation": np.array(list(tree)),
        "row_role": [role for role, *_ in tree.values()],
        "row_branch_turn": np.array([at for _, at, _ in tree.values()]),
        "mask": np.tile([False, True], len(tree)),
    }


def test_branches_are_compared_with_those_that_began_where_they_did_and_others_within_their_role():
    """Trunk 0 with branches 1 and 2 behind its turn 0, of which 2 has two more; and an agent beside
    it.
    """
    rollouts = [
        _conversations(
            {
                0: ("", -1, 0.5),
                1: ("", 0, 1.0),
                2: ("", 0, 0.0),
                3: ("", 2, 4.0),
                4: ("", 2, 2.0),
                6: ("black", -1, -1.0),
            }
        ),
        _conversations({0: ("", -1, 1.0), 5: ("black", -1, 3.0)}),
    ]
    given = {name: [each[name] for each in rollouts] for name in rollouts[0]}
    first, second = (made[1::2].tolist() for made in conversation_advantage.function(**given))
    branch_2 = 0.0 + (4.0 + 2.0) / 2
    trunk = 0.5 + (1.0 + branch_2) / 2
    assert first == pytest.approx(
        [
            trunk - (trunk + 1.0) / 2,
            1.0 - (1.0 + branch_2) / 2,
            branch_2 - (1.0 + branch_2) / 2,
            1.0,
            -1.0,
            -1.0 - 1.0,
        ]
    )
    assert second == pytest.approx([1.0 - (trunk + 1.0) / 2, 3.0 - 1.0])


def test_conversations_of_a_rollout_alone_in_its_role_have_no_advantage():
    made = _conversations({0: ("", -1, 7.0)})
    (found,) = conversation_advantage.function(**{name: [value] for name, value in made.items()})
    assert not found.any()
