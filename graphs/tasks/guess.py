"""The guessing game: a number below 16, as one digit, in four turns, answered by `+` (it is
higher), `-` or `=`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from graphs.tasks import is_held_out
from operators.warm_start import EOS, warm_start

DIGITS = "0123456789abcdef"
"""Of the numbers from 0 to 15."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ALPHABET = DIGITS + LETTERS + "?+-=~"
"""Every character of the task, each once."""

TURNS = 4
MAX_TOKENS = 2
"""Of a turn: a digit and the end token."""

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}"
    + EOS
    + "{% endif %}{% endfor %}"
)
"""A game's messages, laid out as the games of the warm start are."""


def rows(
    count: int, *, seed: int, held_out: bool = False, numbers: int = len(DIGITS)
) -> Iterator[dict[str, str | int]]:
    """Yield `count` games {"prompt", "secret"}. The prompt is a tag of three letters that says
    nothing of the secret, which is below `numbers`; no held-out tag is ever trained on.
    """
    draw = random.Random(f"guess-{seed}-{held_out}")
    count_made = 0
    while count_made < count:
        tag = "".join(draw.choices(LETTERS, k=3))
        if is_held_out(tag) == held_out:
            yield {"prompt": tag + "?", "secret": draw.randrange(numbers)}
            count_made += 1


def games(
    count: int, numbers: int, turns: int, *, seed: int, held_out: bool = False
) -> list[dict[str, str | int]]:
    """Games with what a program that plays them has to know: {"prompt", "secret", "turns"}."""
    return [
        {**row, "turns": turns}
        for row in rows(count, seed=seed, held_out=held_out, numbers=numbers)
    ]


def lay_out_chats(folder: Path) -> None:
    """Give a policy a chat template."""
    if folder.is_dir():  # an explanation makes no policy
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def judge(guess: str, secret: int) -> str:
    """What the world says to a guess: `=`, `+` where the secret is higher, `-` where it is lower;
    `?` to no number.
    """
    number = DIGITS.find(guess) if len(guess) == 1 else -1
    return "?" if number < 0 else "=" if number == secret else "+" if secret > number else "-"


def examples(
    count: int, *, seed: int, care: float = 0.7, numbers: int = len(DIGITS), turns: int = TURNS
) -> Iterator[tuple[str, str]]:
    """Yield turns of games by a careless player, for a warm start: the conversation so far, and the
    next guess. Only a share `care` of the guesses is surely one that what was heard leaves open.
    """
    draw = random.Random(f"guess-examples-{seed}")
    count_made = 0
    while True:
        for game in rows(1000, seed=draw.randrange(1 << 30), numbers=numbers):
            talk, low, high = str(game["prompt"]), 0, numbers - 1
            for _ in range(turns):
                number = (
                    draw.randint(low, high) if draw.random() < care else draw.randrange(numbers)
                )
                yield talk, DIGITS[number]
                count_made += 1
                hint = judge(DIGITS[number], int(game["secret"]))
                talk += DIGITS[number] + EOS + hint
                low = max(low, number + 1) if hint == "+" else low
                high = min(high, number - 1) if hint == "-" else high
                if count_made == count:
                    return
                if hint == "=":
                    break


def warm(policy: str, *, steps: int = 400, numbers: int = len(DIGITS), turns: int = TURNS) -> Path:
    """The folder of a policy that guesses carelessly."""
    return warm_start(
        policy,
        examples=examples(60_000, seed=0, numbers=numbers, turns=turns),
        alphabet=ALPHABET,
        layers=3,
        width=96,
        heads=4,
        steps=steps,
        seed=0,
        learning_rate=2e-3,
    )
