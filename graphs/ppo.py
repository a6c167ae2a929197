"""PPO: a critic says what to expect at each token, and a reference keeps the policy near where it began.

python -m graphs.ppo --policy FOLDER_OR_ID --prompts FILE --reward exact|number|my_rewards.py:function
python -m graphs.ppo --policy FOLDER_OR_ID --prompts FILE --answer "" --judge FOLDER_OR_ID
"""

from dataclasses import replace
from functools import partial

from dataflow import Graph, Model, join, main
from graphs.tasks.text import TextTask
from operators import Logprobs, RewardModel, Trainer, Values
from operators.credit import token_gae, token_rewards
from operators.losses import ppo, value_loss


def build(
    *, task: TextTask, critic: str = "", judge: str = "", max_staleness: int = 0, kl: float = 0.02, lam: float = 0.95,
    clip: float = 0.2, critic_lr: float = 1e-5,
) -> Graph:  # fmt: skip
    """Train a policy and its critic side by side (PPO, arXiv 1707.06347; with KL in the reward, arXiv 1909.08593).

    Args:
        task: what is trained on what.
        critic: folder or id that the critic starts from; the policy's, with a head of its own, when empty.
        judge: folder or id of a reward model (a sequence classifier), which then gives the reward in place of --reward.
        max_staleness: versions that the oldest token of a trained rollout may be behind; 0 is synchronous.
        kl: what a nat of distance from the reference costs, in the reward.
        lam: of generalised advantage estimation; 1 looks at the reward alone, 0 at the critic alone.
        clip: how far from 1 the ratio may go before its gradient ends.
        critic_lr: learning rate of the critic.
    """
    g = Graph("ppo")
    actor, expected = task.model, replace(task.model, source=critic or task.policy, head="value", name="critic")
    reward = task.scorer() if not judge else RewardModel(
        Model(judge, head="score", dtype=task.dtype).frozen(), name="reward", chat=task.chat
    )  # fmt: skip
    generator, reference, values = task.generator(), Logprobs(actor.frozen()), Values(expected)
    train_actor = Trainer(
        actor, name="actor", loss=partial(ppo, clip_low=clip, clip_high=clip), whiten=True, lr=task.lr,
        prompts_per_step=task.prompts_per_step,
    )  # fmt: skip
    train_critic = Trainer(
        expected, name="critic", loss=value_loss, lr=critic_lr, prompts_per_step=task.prompts_per_step
    )

    rollouts = reward(generator(g.source(task.train)))
    known = join(reference(rollouts), values(rollouts))
    credited = token_gae(token_rewards(known, beta=kl), lam=lam)
    train_actor(credited)
    train_critic(credited)
    task.evaluate(g, generator, reward)
    g.feedback(train_actor.weights, generator, max_staleness=max_staleness)
    g.feedback(train_critic.weights, values, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build)
