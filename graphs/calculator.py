"""A small Llama learns the calculator steps inside GSM8K's answers: `48/2=` to `24`.

python -m graphs.calculator --prompts train.jsonl --eval test.jsonl
"""

from functools import partial

from dataflow import Graph, Model, main, scorer
from graphs.tasks import calculator
from operators import Evaluate, Generator, Trainer
from operators.credit import advantage
from operators.losses import aipo

STEPS = 1_000


def build(
    *,
    prompts: str = "",
    eval: str = "",
    policy: str = "policies/calculator",
    max_staleness: int = 4,
    rho: float = 4.0,
    lr: float = 1e-4,
    eval_every: int = 200,
) -> Graph:
    """Train a policy that gets two steps in five right on its own rollouts.

    Args:
        prompts: GSM8K's train.jsonl, or an id on the hub; made-up steps when empty.
        eval: the same for evaluation: test.jsonl.
        policy: folder of the policy; made there by a supervised warm start if it is not there yet.
        max_staleness: versions a trained rollout's oldest token may be behind; 0 is synchronous.
        rho: cap of the importance weight.
        lr: learning rate of AdamW.
        eval_every: steps between evaluations.
    """
    model = Model(str(calculator.warm(policy, prompts)))
    g, reward = Graph("calculator"), scorer(calculator.reward)
    generator = Generator(model, group_size=8, max_tokens=calculator.MAX_TOKENS)
    trainer = Trainer(
        model,
        loss=partial(aipo, rho=rho),
        prompts_per_step=32,
        lr=lr,
        normalize="rollouts",
        warmup_steps=20,
    )

    trainer(advantage(reward(generator(g.source(calculator.source(prompts, "prompts"))))))
    held_out = calculator.source(eval, "held_out", held_out=True)
    Evaluate(every_steps=eval_every)(reward(generator(g.source(held_out))))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build, steps=STEPS)
