"""A small Llama learns to multiply with a tool: it writes a call, a calculator answers, it reads
the product off.

python -m graphs.products
"""

from functools import partial

from dataflow import Graph, Model, main, scorer
from graphs.tasks import products as task
from operators import Evaluate, Generator, Prompts, Trainer, tool_use
from operators.credit import advantage
from operators.losses import aipo

STEPS = 60


def build(
    *,
    policy: str = "policies/products",
    max_staleness: int = 2,
    rho: float = 4.0,
    lr: float = 6e-4,
    eval_every: int = 20,
    blank: bool = False,
) -> Graph:
    """Train a policy that calls carelessly, and copies carelessly what it hears. blank: the
    calculator says nothing.
    """
    model = Model(str(task.warm(policy)))
    g, reward = Graph("products"), scorer(isolate=False)(task.reward)
    prompts = Prompts(list(task.rows(20_000, seed=1)), columns=("answer",), shuffle_seed=0)
    unseen = list(task.rows(512, seed=2, held_out=True))
    held_out = Prompts(unseen, columns=("answer",), name="held_out", group_size=1)
    generator = Generator(model, group_size=8, max_tokens=task.MAX_TOKENS)
    calculated = tool_use(
        [task.calculator(blank=blank)], calls=task.CALLS, name="said", max_turns=task.TURNS
    )
    trainer = Trainer(
        model, loss=partial(aipo, rho=rho), prompts_per_step=32, lr=lr, normalize="rollouts"
    )

    trainer(advantage(reward(calculated(generator, g.source(prompts)))))
    Evaluate(every_steps=eval_every)(reward(calculated(generator, g.source(held_out))))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build, steps=STEPS)
