"""PPO: a critic says what to expect at each token, a reference keeps the policy near its start.

python -m graphs.ppo --policy FOLDER_OR_ID --prompts FILE --reward exact
python -m graphs.ppo --policy FOLDER_OR_ID --prompts FILE --answer "" --judge FOLDER_OR_ID
"""

from functools import partial

from dataflow import Graph, join, main
from graphs.tasks.options import penalized
from graphs.tasks.text import TextTask
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
    """Train a policy and its critic (PPO, arXiv 1707.06347; KL in the reward, arXiv 1909.08593).

    Args:
        critic: folder or id that the critic starts from; the policy's when empty.
        judge: folder or id of a reward model (a sequence classifier), in place of --reward.
        max_staleness: versions a trained rollout's oldest token may be behind; 0 is synchronous.
        kl: what a nat of distance from the reference costs, in the reward.
        lam: of generalised advantage estimation; 1: the reward alone counts, 0: the critic.
        clip: how far from 1 the ratio may go before its gradient ends.
        critic_lr: learning rate of the critic, all of whose weights are trained, with --lora too.
        entropy: what a nat of the policy's entropy is worth, in the loss; 0: nothing.
    """
    g = Graph("ppo")
    generator, reward = task.generator(), task.judge(judge)
    reference, values = task.logprobs(), task.values(critic)
    clipped = partial(ppo, clip_low=clip, clip_high=clip)
    train_actor = task.trainer(name="actor", loss=penalized(clipped, entropy=entropy), whiten=True)
    train_critic = task.trainer(values.model, name="critic", loss=value_loss, lr=critic_lr)

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
