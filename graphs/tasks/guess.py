"""The guessing game: find a number from 0 to 63 in six turns, each answered by `+` (it is higher), `-` or `=`."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

ALPHABET = "0123456789?+-=~" + "abcdefghijklmnopqrstuvwxyz"
"""Every character of the task, each once."""

NUMBERS, TURNS = 64, 6
MAX_TOKENS = 3
"""Of a turn: two digits and the end token."""

END = "<eos>"
HELD_OUT_SHARE = 8
"""One tag in so many is held out of training."""


def rows(count: int, *, seed: int, held_out: bool = False) -> Iterator[dict[str, str | int]]:
    """Yield `count` games {"prompt", "secret"}. The prompt is a tag of three letters that says nothing of the secret;
    no held-out tag is ever trained on."""
    draw = random.Random(f"guess-{seed}-{held_out}")
    made = 0
    while made < count:
        tag = "".join(draw.choices(ALPHABET[-26:], k=3))
        if (zlib.crc32(tag.encode()) % HELD_OUT_SHARE == 0) == held_out:
            yield {"prompt": tag + "?", "secret": draw.randrange(NUMBERS)}
            made += 1


def judge(said: str, secret: int) -> str:
    """What the world says to a guess: `=`, `+` where the secret is higher, `-` where it is lower; `?` to no number."""
    if not (len(said) == 2 and said.isdigit()):
        return "?"
    return "=" if int(said) == secret else "+" if secret > int(said) else "-"


def examples(count: int, *, seed: int, care: float = 0.4) -> Iterator[tuple[str, str]]:
    """Yield turns of games by a careless player, for a warm start: the conversation so far, and the next guess. Only a
    share `care` of the guesses is one that what was heard leaves open."""
    draw = random.Random(f"guess-examples-{seed}")
    made = 0
    for game in rows(count, seed=seed):
        talk, low, high, said = str(game["prompt"]), 0, NUMBERS - 1, ""
        for _ in range(TURNS):
            said = f"{draw.randint(low, high) if draw.random() < care else draw.randrange(NUMBERS):02d}"
            yield talk, said
            made += 1
            heard = judge(said, int(game["secret"]))
            talk += said + END + heard
            low = max(low, int(said) + 1) if heard == "+" else low
            high = min(high, int(said) - 1) if heard == "-" else high
            if heard == "=" or made >= count:
                break
        if made >= count:
            return
