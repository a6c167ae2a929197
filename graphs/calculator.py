"""A small Llama learns the calculator steps inside GSM8K's answers: `48/2=` to `24`.

python -m graphs.calculator --prompts train.jsonl --eval test.jsonl
"""

from functools import partial
from typing import Any

from dataflow import Graph, main
from graphs.pipeline import policy_gradient
from graphs.tasks import calculator, expressions
from operators import Prompts
from operators.credit import advantage
from operators.losses import aipo
from operators.warm_start import warm_start

STEPS = 1_600


def build(
    *, prompts: str = "", eval: str = "", policy: str = "policies/calculator", max_staleness: int = 4,
    rho: float = 4.0, lr: float = 2e-4, eval_every: int = 200,
) -> Graph:  # fmt: skip
    """Train a policy that gets two steps in five right on its own rollouts.

    Args:
        prompts: GSM8K's train.jsonl, or an id on the hub; made-up steps of the same forms when empty.
        eval: the same for evaluation: test.jsonl.
        policy: folder of the policy; made there by a supervised warm start if it is not there yet.
        max_staleness: versions that the oldest token of a trained rollout may be behind; 0 is synchronous.
        rho: cap of the importance weight.
        lr: learning rate of AdamW.
        eval_every: steps between evaluations.
    """
    ...


if __name__ == "__main__":
    main(build, steps=STEPS)
