"""GRPO: the synchronous baseline. Every rollout is trained by the weights that made it.

python -m graphs.grpo --policy FOLDER_OR_ID --prompts FILE --reward exact|number|my_rewards.py:function
"""

from functools import partial

from dataflow import Graph, main
from graphs.pipeline import policy_gradient
from operators import Prompts
from operators.credit import normalized_advantage
from operators.losses import grpo
from operators.rewards import find


def build(
    *,
    policy: str,
    prompts: str,
    held_out: str = "",
    reward: str = "number",
    answer: str = "answer",
    max_staleness: int = 0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    lr: float = 1e-6,
    prompts_per_step: int = 64,
    group_size: int = 8,
    max_tokens: int = 1024,
    eval_every: int = 50,
    dtype: str = "bfloat16",
) -> Graph:
    """Train a policy on its own rollouts, generation and training taking turns (GRPO, arXiv 2402.03300).

    Args:
        policy: Hugging Face folder or id.
        prompts: JSONL, Parquet or Arrow file, data set folder or id, with a column `prompt` and the answer's.
        held_out: the same, for evaluation; none when empty.
        reward: exact, number, or path/to/file.py:function.
        answer: column that the reward compares with.
        max_staleness: versions that the oldest token of a trained rollout may be behind; 0 is synchronous.
        clip_low: how far below 1 the ratio may fall before its gradient ends.
        clip_high: how far above 1 it may rise.
        lr: learning rate of AdamW.
        prompts_per_step: groups in an optimiser step.
        group_size: rollouts of a prompt.
        max_tokens: longest completion.
        eval_every: steps between evaluations.
        dtype: that the weights are computed in.
    """
    columns = (answer,)
    return policy_gradient(
        "grpo", policy=policy, prompts=Prompts(prompts, columns=columns), reward=find(reward),
        held_out=Prompts(held_out, columns=columns, name="held_out", group_size=1) if held_out else None,
        credit=normalized_advantage, loss=partial(grpo, clip_low=clip_low, clip_high=clip_high),
        max_staleness=max_staleness, max_tokens=max_tokens, group_size=group_size,
        prompts_per_step=prompts_per_step, lr=lr, every_steps=eval_every, dtype=dtype, normalize="rollout_means",
    )  # fmt: skip


if __name__ == "__main__":
    main(build)
