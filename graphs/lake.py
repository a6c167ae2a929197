"""A small Llama learns to cross TextArena's frozen lake: each turn it hears what lies around it,
and says where to go.

pip install "dataflow-rl[textarena]"; python -m graphs.lake
"""

from functools import partial

from dataflow import Graph, Model, main
from graphs.tasks import lake as task
from operators import Evaluate, Generator, Trainer
from operators.credit import advantage
from operators.environments import environment
from operators.losses import aipo

STEPS = 60


def build(
    *,
    policy: str = "policies/lake",
    max_staleness: int = 2,
    rho: float = 4.0,
    lr: float = 6e-4,
    eval_every: int = 20,
    blank: bool = False,
) -> Graph:
    """Train a policy that walks carelessly. blank: it hears nothing of what lies around it."""
    world = environment(
        "textarena:FrozenLake-v0",
        max_turns=task.TURNS,
        wording=partial(task.heard, blank=blank),
        action=task.move,
        total=task.crossed,
    )
    g, model = Graph("lake"), Model(str(task.warm(policy)))
    generator = Generator(model, group_size=8, max_tokens=task.MAX_TOKENS)
    trainer = Trainer(
        model, loss=partial(aipo, rho=rho), prompts_per_step=32, lr=lr, normalize="rollouts"
    )

    trainer(advantage(world(generator, g.source(world.tasks(range(20_000), shuffle_seed=0)))))
    held_out = world.tasks(range(20_000, 20_512), name="held_out", group_size=1)
    Evaluate(every_steps=eval_every)(world(generator, g.source(held_out)))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build, steps=STEPS)
