"""A small Llama learns to find a number by asking: four guesses, each answered by higher or lower.

python -m graphs.guess
"""

from functools import partial

from dataflow import Graph, Model, main, scorer
from graphs.tasks import guess as task
from operators import Evaluate, Generator, Prompts, Trainer, episode
from operators.credit import advantage
from operators.episodes.chat import EpisodeOver
from operators.losses import aipo

STEPS = 150


@episode(max_turns=task.TURNS)
async def guess(chat, secret: int, blank: bool = False) -> float:  # type: ignore[no-untyped-def]
    """1 if the policy finds the secret. blank: the world says nothing that helps."""
    try:
        while (hint := task.judge(await chat.say(), secret)) != "=":
            chat.hear("~" if blank else hint)
    except EpisodeOver:
        return 0.0
    return 1.0


@scorer(isolate=False)
def reward(guess: float) -> float:
    """What the game came to."""
    return guess


def build(
    *,
    policy: str = "policies/guess",
    max_staleness: int = 2,
    rho: float = 4.0,
    lr: float = 6e-4,
    eval_every: int = 50,
    blank: bool = False,
) -> Graph:
    """Train a policy that guesses carelessly. blank: its guesses are not answered."""
    g, model, loss = Graph("guess"), Model(str(task.warm(policy))), partial(aipo, rho=rho)
    prompts = Prompts(list(task.rows(20_000, seed=1)), columns=("secret",), shuffle_seed=0)
    unseen = list(task.rows(512, seed=2, held_out=True))
    held_out = Prompts(unseen, columns=("secret",), name="held_out", group_size=1)
    generator = Generator(model, group_size=8, max_tokens=task.MAX_TOKENS)
    trainer = Trainer(model, loss=loss, prompts_per_step=32, lr=lr, normalize="rollouts")

    trainer(advantage(reward(guess(generator, g.source(prompts), blank=blank))))
    Evaluate(every_steps=eval_every)(reward(guess(generator, g.source(held_out), blank=blank)))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build, steps=STEPS)
