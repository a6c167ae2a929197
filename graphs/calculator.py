"""A small Llama learns the calculator steps inside GSM8K's answers: `48/2=` to `24`.

python -m graphs.calculator --prompts train.jsonl --eval test.jsonl
"""

from functools import partial
from pathlib import Path
from typing import Any

from dataflow import Graph, main, scorer
from graphs.pipeline import policy_gradient
from graphs.tasks import calculator, expressions
from operators import Prompts
from operators.credit import advantage
from operators.losses import aipo
from operators.warm_start import warm_start

STEPS = 1_000


def build(
    *, prompts: str = "", eval: str = "", policy: str = "policies/calculator", max_staleness: int = 4,
    rho: float = 4.0, lr: float = 1e-4, eval_every: int = 200,
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
    examples = calculator.read(prompts) if Path(prompts).is_file() else expressions.rows(24_000, seed=0)
    folder = warm_start(
        policy, examples=((row["prompt"], row["answer"]) for row in examples), alphabet=calculator.ALPHABET,
        layers=4, width=128, heads=4, steps=180, batch_size=128, seed=0,
    )  # fmt: skip
    return policy_gradient(
        "calculator", policy=str(folder), prompts=_steps(prompts, "prompts", held_out=False),
        held_out=_steps(eval, "held_out", held_out=True), reward=scorer(calculator.reward), credit=advantage,
        loss=partial(aipo, rho=rho), max_staleness=max_staleness, max_tokens=calculator.MAX_TOKENS, group_size=8,
        prompts_per_step=32, lr=lr, normalize="rollouts", every_steps=eval_every, warmup_steps=20,
    )  # fmt: skip


def _steps(source: str, name: str, *, held_out: bool) -> Prompts:
    """The calculator steps of a GSM8K file or data set; made-up ones without either."""
    made_up = list(expressions.rows(2_000 if held_out else 24_000, seed=1, held_out=held_out))
    rows: Any = calculator.steps if source else None
    size, seed = (1, None) if held_out else (None, 0)
    return Prompts(
        source or made_up, rows=rows, columns=("answer",), name=name, group_size=size, shuffle_seed=seed
    )  # fmt: skip


if __name__ == "__main__":
    main(build, steps=STEPS)
