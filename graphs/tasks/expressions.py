"""Made-up calculator steps with the forms, operators and lengths of those in GSM8K."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction

from graphs.tasks.arithmetic import value
from graphs.tasks.held_out import is_held_out

# Measured on the 23,716 steps of GSM8K's train split, in steps per thousand; a form's n is a
# number.
FORMS = {
    "n*n": 356,
    "n+n": 187,
    "n-n": 166,
    "n/n": 147,
    "n+n+n": 45,
    "n/n*n": 25,
    "n*n/n": 17,
    "n": 15,
    "n+n+n+n": 12,
    "n*n*n": 9,
    "n-n-n": 7,
    "n*(n/n)": 3,
    "n+n+n+n+n": 3,
    "(n/n)*n": 2,
    "n*n+n": 2,
    "n-n-n-n": 1,
    "n+n*n": 1,
    "n/(n/n)": 1,
    "n*n-n": 1,
    "n*n+n*n": 1,
    "n+n-n": 1,
    "+n+n": 1,
}
# How the number before and after an operator is written, in per cent: d is a digit (the first and
# the last of a whole number are not 0), 0 is 0.
BEFORE = {
    "*": {
        "d": 50,
        "d0": 18,
        "dd": 16,
        "d00": 5,
        "dd0": 3,
        "d.d": 2,
        "ddd": 2,
        "d000": 1,
        "dd00": 1,
        "d.dd": 1,
        ".d": 1,
    },
    "/": {
        "dd": 31,
        "d0": 24,
        "dd0": 13,
        "d00": 8,
        "d": 8,
        "ddd": 6,
        "dd00": 4,
        "d000": 3,
        "ddd0": 1,
        "d0000": 1,
        "d.d": 1,
    },
    "+": {
        "dd": 28,
        "d": 24,
        "d0": 22,
        "dd0": 8,
        "d00": 7,
        "ddd": 4,
        "dd00": 2,
        "d000": 2,
        "ddd0": 1,
        "d0000": 1,
        "d.d": 1,
    },
    "-": {
        "dd": 30,
        "d0": 22,
        "d00": 12,
        "dd0": 10,
        "d": 9,
        "ddd": 6,
        "d000": 3,
        "dd00": 3,
        "dddd": 1,
        "ddd0": 1,
        "d0000": 1,
    },
}
AFTER = {
    "*": {
        "d": 56,
        "d0": 15,
        "dd": 12,
        ".d": 4,
        "d.d": 3,
        "d00": 3,
        ".dd": 2,
        "d.dd": 2,
        "dd0": 1,
        "d000": 1,
        "ddd": 1,
    },
    "/": {"d": 70, "d0": 14, "dd": 9, "d00": 2, "d.d": 1, "dd0": 1, ".d": 1, "d000": 1, "d.dd": 1},
    "+": {
        "d": 36,
        "dd": 23,
        "d0": 21,
        "dd0": 6,
        "d00": 5,
        "ddd": 3,
        "d000": 2,
        "dd00": 1,
        "d.d": 1,
        "dddd": 1,
        "d.dd": 1,
    },
    "-": {
        "d": 33,
        "dd": 25,
        "d0": 18,
        "dd0": 6,
        "d00": 5,
        "ddd": 5,
        "dd00": 2,
        "d000": 1,
        "d.d": 1,
        "d.dd": 1,
        "dddd": 1,
    },
}
DIGITS = {"0": 8, "1": 20, "2": 21, "3": 11, "4": 11, "5": 14, "6": 8, "7": 4, "8": 6, "9": 3}
"""How often each digit stands where a shape has a d, in per cent; 0 never stands first or last."""

MOST_DECIMALS = 2
"""Answers with more decimals are not asked for."""


def rows(count: int, *, seed: int, held_out: bool = False) -> Iterator[dict[str, str]]:
    """Yield `count` rows {"prompt", "answer"}, of training or of held-out prompts, drawn from the
    seed.

    A form is drawn first, then its numbers until the answer is not negative and has at most two
    decimals.
    """
    draw = random.Random(f"calculator-{seed}-{held_out}")
    forms, weights = list(FORMS), list(FORMS.values())
    for form in draw.choices(forms, weights, k=count):
        while True:
            expression = _fill(form, draw)
            answer = decimal(value(expression))
            if answer is not None and is_held_out(expression + "=") == held_out:
                break
        yield {"prompt": expression + "=", "answer": answer}


def decimal(exact: Fraction | None) -> str | None:
    """The shortest way to write a number that is not negative in at most two decimals, or None."""
    if exact is None or exact < 0 or (exact * 10**MOST_DECIMALS).denominator != 1:
        return None
    whole, hundredths = divmod(int(exact * 10**MOST_DECIMALS), 10**MOST_DECIMALS)
    return f"{whole}.{hundredths:0{MOST_DECIMALS}d}".rstrip("0").rstrip(".")


def _fill(form: str, draw: random.Random) -> str:
    """Write a number for every n of a form, shaped by the operator before it, else by the one after
    it.
    """
    text = ""
    for place, mark in enumerate(form):
        if mark != "n":
            text += mark
            continue
        before = form[place - 1 : place].strip("()")
        after = form[place + 1 : place + 2].strip("()") or "+"
        shapes = AFTER[before] if before else BEFORE[after]
        text += _number(draw.choices(list(shapes), list(shapes.values()))[0], draw)
    return text


def _number(shape: str, draw: random.Random) -> str:
    whole = shape.rstrip("0")
    text = ""
    for place, mark in enumerate(whole):
        outer = place in (0, len(whole) - 1) and "." not in whole
        text += _digit(draw, outer or place == len(whole) - 1) if mark == "d" else mark
    return text + shape[len(whole) :]


def _digit(draw: random.Random, outer: bool) -> str:
    digits = list(DIGITS)[outer:]
    return draw.choices(digits, [DIGITS[digit] for digit in digits])[0]
