"""Asynchronous AIPO: generation never waits, and weights may change in the middle of a rollout.

python -m graphs.aipo --policy FOLDER_OR_ID --prompts FILE --reward exact|number|my_rewards.py:function
"""

from functools import partial

from dataflow import Graph, main
from graphs.pipeline import policy_gradient
from operators import Prompts
from operators.credit import advantage
from operators.losses import aipo
from operators.rewards import find


def build(
    *,
    policy: str,
    prompts: str,
    held_out: str = "",
    reward: str = "number",
    answer: str = "answer",
    max_staleness: int = 4,
    rho: float = 4.0,
    lr: float = 1e-6,
    prompts_per_step: int = 64,
    group_size: int = 8,
    max_tokens: int = 1024,
    eval_every: int = 50,
    dtype: str = "bfloat16",
) -> Graph:
    """Train a policy on its own rollouts, at most `max_staleness` versions old (LlamaRL, arXiv 2505.24034).

    Args:
        policy: Hugging Face folder or id.
        prompts: JSONL, Parquet or Arrow file, data set folder or id, with a column `prompt` and the answer's.
        held_out: the same, for evaluation; none when empty.
        reward: exact, number, or path/to/file.py:function.
        answer: column that the reward compares with.
        max_staleness: versions that the oldest token of a trained rollout may be behind; 0 is synchronous.
        rho: cap of the importance weight.
        lr: learning rate of AdamW.
        prompts_per_step: groups in an optimiser step.
        group_size: rollouts of a prompt.
        max_tokens: longest completion.
        eval_every: steps between evaluations.
        dtype: that the weights are computed in.
    """
    columns = (answer,)
    return policy_gradient(
        "aipo", policy=policy, prompts=Prompts(prompts, columns=columns), reward=find(reward),
        held_out=Prompts(held_out, columns=columns, name="held_out", group_size=1) if held_out else None,
        credit=advantage, loss=partial(aipo, rho=rho), max_staleness=max_staleness, max_tokens=max_tokens,
        group_size=group_size, prompts_per_step=prompts_per_step, lr=lr, every_steps=eval_every, dtype=dtype,
    )  # fmt: skip


if __name__ == "__main__":
    main(build)
