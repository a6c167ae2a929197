"""A small Llama learns to find a number in games of a program with OpenAI's or Anthropic's package.

python -m graphs.played_by_programs --client anthropic
"""

from functools import partial
from pathlib import Path
from typing import Literal

from dataflow import Graph, Model, main, scorer
from graphs.tasks import guess as task
from operators import Endpoint, Evaluate, Generator, Prompts, Trainer, agent
from operators.credit import advantage
from operators.losses import aipo

STEPS = 40
NUMBERS, TURNS = 8, 3
AGENTS = Path(__file__).with_name("agents")


@scorer(isolate=False)
def reward(guess: float) -> float:
    """What the program says that the game came to."""
    return guess


def build(
    *,
    client: Literal["openai", "anthropic"] = "openai",
    python: str = "python",
    policy: str = "policies/played",
    max_staleness: int = 2,
    rho: float = 4.0,
    lr: float = 1e-3,
    eval_every: int = 20,
) -> Graph:
    """Train a careless guesser. client: whose package the program uses. python: its interpreter."""
    folder = task.warm(policy, steps=300, numbers=NUMBERS, turns=TURNS)
    task.lay_out_chats(folder)
    g, model = Graph("played_by_programs"), Model(str(folder))
    columns = ("secret", "turns")
    prompts = Prompts(task.games(20_000, NUMBERS, TURNS, seed=1), columns=columns, shuffle_seed=0)
    unseen = task.games(256, NUMBERS, TURNS, seed=2, held_out=True)
    held_out = Prompts(unseen, columns=columns, name="held_out", group_size=1)
    generator = Endpoint(Generator(model, group_size=8, max_tokens=task.MAX_TOKENS))
    trainer = Trainer(
        model, loss=partial(aipo, rho=rho), prompts_per_step=8, lr=lr, normalize="rollouts"
    )
    program = f"{python} {AGENTS}/guess_with_{client}.py"
    guess = agent(program, name="guess", columns=columns, returns=float, imports=[client])

    trainer(advantage(reward(guess(generator, g.source(prompts)))))
    Evaluate(every_steps=eval_every)(reward(guess(generator, g.source(held_out))))
    g.feedback(trainer.weights, generator.generator, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build, steps=STEPS)
