"""The sorting task: put 3 to 10 different letters in order, `gbda=` to `abdg`."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from graphs.tasks import is_held_out
from operators.warm_start import warm_start

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ALPHABET = LETTERS + "="
"""Every character of the task, each once."""

SHORTEST, LONGEST = 3, 10
"""Length of a prompt without its `=`, in letters."""

MAX_TOKENS = LONGEST + 2
"""Room for the longest answer, its end token and one token too many."""


def rows(count: int, *, seed: int, held_out: bool = False) -> Iterator[dict[str, str]]:
    """Yield `count` rows {"prompt", "answer"}, of training or of held-out prompts, drawn from the
    seed.

    Lengths are uniform from 3 to 10; the letters of a prompt are different from each other.
    """
    draw = random.Random(f"sorting-{seed}-{held_out}")
    count_made = 0
    while count_made < count:
        length = draw.randint(SHORTEST, LONGEST)
        while True:
            letters = draw.sample(LETTERS, length)
            answer = "".join(sorted(letters))
            if is_held_out(answer) == held_out:  # in whatever order its letters are given
                break
        yield {"prompt": "".join(letters) + "=", "answer": answer}
        count_made += 1


def reward(completion: str, answer: str) -> float:
    """1 if the completion is the letters in order and nothing else, else 0."""
    return float(completion.strip() == answer)


def warm(policy: str, words: Iterable[dict[str, str]]) -> Path:
    """The folder of a policy that sorts one word in five."""
    return warm_start(
        policy,
        examples=((row["prompt"], row["answer"]) for row in words),
        alphabet=ALPHABET,
        layers=3,
        width=128,
        heads=4,
        steps=140,
        seed=0,
        learning_rate=5e-4,
    )
