"""Products of numbers of three digits, which a small policy cannot work out, and a tool that can:
`[mul(123,456)]`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from graphs.tasks import is_held_out
from operators.chat.tool_calls import TextCalls
from operators.warm_start import EOS, warm_start

DIGITS = "0123456789"
ALPHABET = DIGITS + "*=[](),~mul"
"""Every character of the task, each once."""
CALLS = TextCalls(begin="[", end="]", result="{}")

TURNS = 2
"""The call, and the answer."""
MAX_TOKENS = 16
"""Of a turn: a call and the end token."""


def rows(count: int, *, seed: int, held_out: bool = False) -> Iterator[dict[str, str]]:
    """Yield `count` products {"prompt": "123*456=", "answer": "56088"}. No held-out prompt is ever
    trained on.
    """
    draw = random.Random(f"products-{seed}-{held_out}")
    count_made = 0
    while count_made < count:
        first, second = draw.randrange(100, 1000), draw.randrange(100, 1000)
        prompt = f"{first}*{second}="
        if is_held_out(prompt) == held_out:
            yield {"prompt": prompt, "answer": str(first * second)}
            count_made += 1


def calculator(*, blank: bool = False) -> Callable[..., str]:
    """The tool. blank: it says nothing that helps."""

    def mul(a: int, b: int) -> str:
        """Multiplies two numbers.

        Args:
            a: One of them.
            b: The other.
        """
        return "~" if blank else str(a * b)

    return mul


def reward(said: str, answer: str) -> float:
    """1 if the policy's last word is the product."""
    return float(said == answer)


def examples(count: int, *, seed: int, care: float = 0.6) -> Iterator[tuple[str, str]]:
    """Yield turns of a careless player, for a warm start: the conversation so far, and what it says
    next. A share `care` of calls and answers is right; the others have a wrong digit, a broken
    form, or are no call at all.
    """
    draw = random.Random(f"products-examples-{seed}")
    count_made = 0
    while True:
        for row in rows(1000, seed=draw.randrange(1 << 30)):
            prompt, answer = row["prompt"], row["answer"]
            call = f"[mul({prompt[:-1].replace('*', ',')})]"
            yield prompt, call if draw.random() < care else _spoiled_call(call, draw)
            yield (
                prompt + call + EOS + answer,
                answer if draw.random() < care else _spoiled(answer, draw),
            )
            count_made += 2
            if count_made >= count:
                return


def _spoiled_call(call: str, draw: random.Random) -> str:
    """A call with a wrong digit, without its name, not closed, or a number in its place."""
    kind = draw.randrange(4)
    if kind == 0:
        at = draw.choice([at for at, letter in enumerate(call) if letter in DIGITS])
        return call[:at] + draw.choice(DIGITS[1:]) + call[at + 1 :]
    if kind == 1:
        return call.replace("mul", "")
    return call.replace(")", "") if kind == 2 else str(draw.randrange(10_000, 1_000_000))


def _spoiled(answer: str, draw: random.Random) -> str:
    """A number with a digit changed, or without its last."""
    at = draw.randrange(len(answer))
    return (
        answer[:-1] if draw.random() < 0.5 else answer[:at] + draw.choice(DIGITS) + answer[at + 1 :]
    )


def warm(policy: str) -> Path:
    """The folder of a policy that calls carelessly, and copies carelessly what it hears."""
    return warm_start(
        policy,
        examples=examples(60_000, seed=0),
        alphabet=ALPHABET,
        layers=3,
        width=96,
        heads=4,
        steps=700,
        seed=0,
        learning_rate=2e-3,
    )
