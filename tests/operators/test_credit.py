"""Laws of credit: advantages of a group add up to nothing, and only GRPO's divides by the deviation."""

import numpy as np

from operators.credit import advantage, normalized_advantage

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


def test_equal_rewards_give_no_advantage():
    for rule in (advantage, normalized_advantage):
        assert (rule(np.ones(4)) == 0).all()
        assert (rule(np.ones(1)) == 0).all()


def test_both_rules_write_the_column_that_losses_read():
    assert advantage.name == normalized_advantage.name == "advantage"
    assert list(advantage.reads()) == list(normalized_advantage.reads()) == ["reward"]
    assert advantage.per == normalized_advantage.per == "group"
