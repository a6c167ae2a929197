"""A small Llama learns to sort letters: `gbda=` to `abdg`. Needs no data; what `make demo` runs.

python -m graphs.sorting
"""

from functools import partial

from dataflow import Graph, Model, main
from graphs.tasks import sorting
from operators import Evaluate, Generator, Prompts, Trainer
from operators.credit import advantage
from operators.losses import aipo
from operators.rewards import find

STEPS = 300


def build(
    *,
    policy: str = "policies/sorting",
    max_staleness: int = 4,
    rho: float = 4.0,
    lr: float = 4e-4,
    eval_every: int = 100,
) -> Graph:
    """Train a policy that sorts one word in five on its own rollouts.

    Args:
        policy: folder of the policy; made there by a supervised warm start if it is not there yet.
        max_staleness: versions a trained rollout's oldest token may be behind; 0 is synchronous.
        rho: cap of the importance weight.
        lr: learning rate of AdamW.
        eval_every: steps between evaluations on words that are never trained.
    """
    words = list(sorting.rows(20_000, seed=0))
    unseen = list(sorting.rows(512, seed=1, held_out=True))
    model = Model(str(sorting.warm(policy, words)))
    g, reward = Graph("sorting"), find("exact")
    prompts = Prompts(words, columns=("answer",), shuffle_seed=0)
    held_out = Prompts(unseen, columns=("answer",), name="held_out", group_size=1)
    generator = Generator(model, group_size=8, max_tokens=sorting.MAX_TOKENS)
    trainer = Trainer(
        model, loss=partial(aipo, rho=rho), prompts_per_step=32, lr=lr, normalize="rollouts"
    )

    trainer(advantage(reward(generator(g.source(prompts)))))
    Evaluate(every_steps=eval_every)(reward(generator(g.source(held_out))))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build, steps=STEPS)
