"""PPO: a critic says what to expect at each token, and a reference keeps the policy near where it
began.

python -m graphs.ppo --policy FOLDER_OR_ID --prompts FILE --reward
exact|number|my_rewards.py:function python -m graphs.ppo --policy FOLDER_OR_ID --prompts FILE
--answer "" --judge FOLDER_OR_ID
"""

from dataclasses import replace
from functools import partial
from typing import Any

from dataflow import Graph, Model, join, main
from graphs.tasks.options import penalized, refuse_idle
from graphs.tasks.text import TextTask
from operators import RewardModel, Values
from operators.credit import token_gae, token_rewards
from operators.losses import ppo, value_loss


def build(
    *,
    task: TextTask,
    critic: str = "",
    judge: str = "",
    max_staleness: int = 0,
    kl: float = 0.02,
    lam: float = 0.95,
    clip: float = 0.2,
    critic_lr: float = 1e-5,
    entropy: float = 0.0,
) -> Graph:
    """Train a policy and its critic side by side (PPO, arXiv 1707.06347; with KL in the reward,
    arXiv 1909.08593).

    Args:
        critic: folder or id that the critic starts from; the policy's, with a head of its own, when
            empty.
        judge: folder or id of a reward model (a sequence classifier), which then gives the reward
            in place of --reward.
        max_staleness: versions that the oldest token of a trained rollout may be behind; 0 is
            synchronous.
        kl: what a nat of distance from the reference costs, in the reward.
        lam: of generalised advantage estimation; 1 looks at the reward alone, 0 at the critic
            alone.
        clip: how far from 1 the ratio may go before its gradient ends.
        critic_lr: learning rate of the critic, all of whose weights are trained, with --lora too.
        entropy: what a nat of the policy's entropy is worth, in the loss; 0: nothing.
    """
    refuse_idle(task, ("reward",) * bool(judge), "--judge gives it")
    g = Graph("ppo")
    expected = replace(
        task.model, source=critic or task.policy, head="value", name="critic", lora=None
    )
    reads: dict[str, Any] = {"micro_batch_tokens": task.micro_batch_tokens}
    reward = (
        task.scorer()
        if not judge
        else RewardModel(
            Model(judge, head="score", dtype=task.dtype).frozen(),
            name="reward",
            chat=task.chat,
            **reads,
        )
    )
    generator, reference, values = task.generator(), task.logprobs(), Values(expected, **reads)
    clipped = partial(ppo, clip_low=clip, clip_high=clip)
    train_actor = task.trainer(name="actor", loss=penalized(clipped, entropy=entropy), whiten=True)
    train_critic = task.trainer(expected, name="critic", loss=value_loss, lr=critic_lr)

    rollouts = reward(generator(g.source(task.train)))
    joined = join(reference(rollouts), values(rollouts))
    credited = token_gae(token_rewards(joined, beta=kl), lam=lam)
    train_actor(credited)
    train_critic(credited)
    task.evaluate(g, generator, reward)
    g.feedback(train_actor.weights, generator, max_staleness=max_staleness)
    g.feedback(train_critic.weights, values, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build)
