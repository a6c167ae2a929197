"""A program whose episodes run on another host than their generator: python local_episodes.py
[flags of a run].

The environment's POLICY is the folder of a model.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT.parent), str(ROOT)]

from dataflow import Graph, Model, main, scorer  # noqa: E402
from operators import Generator, Prompts, Trainer, episode  # noqa: E402
from operators.credit import advantage  # noqa: E402
from operators.losses import aipo  # noqa: E402


@episode(max_turns=3)
async def talk(chat: Any, answer: str) -> float:
    """Three turns, of which the world repeats the first letter."""
    for _ in range(3):
        said = await chat.say(max_tokens=3)
        chat.hear(f"{answer}{said[:1]}=")
    return float(said > "m")


@scorer(isolate=False)
def reward(talk: float) -> float:
    return talk


def build(*, size: int = 32) -> Graph:
    """size: prompts; 0: without end."""
    g, model = Graph("talks"), Model(os.environ["POLICY"])
    rows = [{"prompt": f"{chr(97 + n % 26)}{n}=", "answer": str(n % 5)} for n in range(size or 26)]
    generator = Generator(model, group_size=2, max_tokens=6, slots=16, segment_tokens=2)
    trainer = Trainer(
        model, loss=partial(aipo, rho=4.0), prompts_per_step=4, lr=1e-2, checkpoint_every=2
    )
    source = Prompts(rows, columns=("answer",), epochs=1 if size else None)
    trainer(advantage(reward(talk(generator, g.source(source)))))
    g.feedback(trainer.weights, generator, max_staleness=1)
    return g


if __name__ == "__main__":
    main(build)
