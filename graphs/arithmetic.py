"""SmolLM2-135M-Instruct learns arithmetic on a laptop in its chat template; `make real` runs it.

python -m graphs.arithmetic
"""

from functools import partial
from typing import Literal

from dataflow import Graph, main
from graphs.tasks.options import penalized
from graphs.tasks.questions import QuestionTask
from operators import Evaluate, Generator, Logprobs, Trainer
from operators.credit import advantage
from operators.losses import aipo
from operators.rewards import find

STEPS = 150


def build(
    *,
    task: QuestionTask = QuestionTask(),
    max_staleness: int = 4,
    kl: float = 0.0,
    engine: Literal["native", "vllm"] = "native",
) -> Graph:
    """Train a real language model on its own answers to questions whose answer is a number.

    Args:
        task: which questions, and how many make a step.
        max_staleness: versions a trained rollout's oldest token may be behind; 0 is synchronous.
        kl: what a nat of distance from the policy at the start costs, in the loss; 0: nothing.
        engine: what makes the forward passes; vllm is installed apart.
    """
    g, reward, model = Graph("arithmetic"), find("number"), task.model
    generator = Generator(
        model, group_size=task.group_size, max_tokens=task.max_tokens, chat=True, engine=engine
    )
    rollouts = generator(g.source(task.train))
    if kl:
        rollouts = Logprobs(model.frozen())(rollouts)
    trainer = Trainer(
        model,
        loss=penalized(partial(aipo, rho=4.0), kl=kl, corrected=max_staleness > 0),
        prompts_per_step=task.prompts_per_step,
        lr=task.lr,
        warmup_steps=5,
        schedule="linear",
    )

    trainer(advantage(reward(rollouts)))
    Evaluate(every_steps=task.eval_every)(reward(generator(g.source(task.test))))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build, steps=STEPS)
