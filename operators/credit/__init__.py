"""Credit: how much better each rollout, or each of its tokens, did than was to be expected, as
scorers.
"""

from operators.credit.conversations import conversation_advantage
from operators.credit.groups import advantage, leave_one_out, normalized_advantage
from operators.credit.tokens import gae, reward_to_go, token_gae, token_rewards, turn_rewards

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
