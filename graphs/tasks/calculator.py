"""The calculator task: the steps inside GSM8K's answers, `<<48/2=24>>` as prompt `48/2=` and answer
`24`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from dataflow.errors import RecordError
from graphs.tasks import is_held_out
from operators import Prompts
from operators.warm_start import warm_start

# Numbers and arithmetic as text, read exactly: `.2`, `1,000`, `50%`, `3/4`, `2*(3+4)`.

LONGEST_TEXT = 100
"""Texts with more characters than this are no numbers and no expressions."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(rf"([-+]?)\$?({_DIGITS})(%?)", re.ASCII)
_TOKEN = re.compile(rf"\$?{_DIGITS}%?|[-+*/()]", re.ASCII)


def number(text: str) -> Fraction | None:
    """The exact value of a number standing alone, or None: `0.20`, `.2`, `-5`, `$1,000`, `50%` (a
    half).
    """
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= LONGEST_TEXT else None
    if match is None:
        return None
    sign, digits, percent = match.groups()
    value = Fraction(digits.replace(",", "").rstrip("."))
    return value * (-1 if sign == "-" else 1) / (100 if percent else 1)


def value(text: str) -> Fraction | None:
    """The exact value of an expression of numbers, `+ - * /` and parentheses, or None where it has
    none.
    """
    squeezed = re.sub(r"\s+", "", text)
    tokens = _TOKEN.findall(squeezed)
    if len(squeezed) > LONGEST_TEXT or "".join(tokens) != squeezed:
        return None
    tokens.reverse()
    try:
        result = _sum(tokens)
    except (SyntaxError, ZeroDivisionError):
        return None
    return None if tokens else result


def _sum(tokens: list[str]) -> Fraction:
    total = _product(tokens)
    while tokens and tokens[-1] in "+-":
        sign = 1 if tokens.pop() == "+" else -1
        total += sign * _product(tokens)
    return total


def _product(tokens: list[str]) -> Fraction:
    total = _factor(tokens)
    while tokens and tokens[-1] in "*/":
        if tokens.pop() == "*":
            total *= _factor(tokens)
        else:
            total /= _factor(tokens)
    return total


def _factor(tokens: list[str]) -> Fraction:
    """One signed number or parenthesis; `tokens` hold the rest of the expression, the next one
    last.
    """
    if not tokens:
        raise SyntaxError("an expression ended too early")
    token = tokens.pop()
    if token in "+-":
        return _factor(tokens) * (1 if token == "+" else -1)
    if token == "(":
        inner = _sum(tokens)
        if not tokens or tokens.pop() != ")":
            raise SyntaxError("a parenthesis is not closed")
        return inner
    parsed = number(token)
    if parsed is None:
        raise SyntaxError(f"{token!r} is no number")
    return parsed


def same_number(completion: str, answer: str) -> bool:
    """Whether a completion is the number of the answer, however the two are written.

    A fraction such as `3/4` counts only where the answer is written as one: a completion may not
    leave the division that was asked for to whoever reads it.
    """
    expected = number(answer)
    if expected is not None:
        return number(completion) == expected
    expected = value(answer)
    return expected is not None and value(completion) == expected


# Made-up calculator steps with the forms, operators and lengths of those in GSM8K.

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


ALPHABET = "0123456789.+-*/()=%"
"""Every character of the task, each once."""

LONGEST_PROMPT = 40
"""Steps with a longer left side are skipped, in characters; the longest one of GSM8K has 30."""

MAX_TOKENS = 12
"""Room for the longest answer of GSM8K, 10 characters, its end token and one token too many."""

_STEP = re.compile(r"<<([^<>]*)>>")
_DECORATION = re.compile(r"[\s$,]")


def steps(row: Mapping[str, object]) -> list[dict[str, str]]:
    """The steps of a row {"question", "answer"} in their order, each as {"prompt", "answer"}.

    Blanks, dollar signs and thousands separators are left out. A step whose left side is no
    expression of numbers, or whose answer is no number, is skipped, and so is one longer than
    LONGEST_PROMPT.

    Raises:
        RecordError: the row has no text under "answer".
    """
    text = row.get("answer")
    if not isinstance(text, str):
        raise RecordError(
            f"a GSM8K row has no answer text; found columns {sorted(row)}; "
            'give rows such as {"question": ..., "answer": "... <<48/2=24>> ..."}'
        )
    rows = []
    for step in _STEP.findall(text):
        problem, _, right = _DECORATION.sub("", step).rpartition("=")
        is_known = set(problem + right) <= set(ALPHABET) and len(problem) < LONGEST_PROMPT
        if is_known and value(problem) is not None and value(right) is not None:
            rows.append({"prompt": problem + "=", "answer": right})
    return rows


def read(path: str | Path) -> Iterator[dict[str, str]]:
    """Yield every step of a GSM8K JSONL file as {"prompt", "answer"}, in the file's order.

    Raises:
        RecordError: a line is no JSON object with an answer text; names the file and the line.
    """
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise RecordError(
                    f"{path}:{number} is no JSON; found {line[:60]!r} ({error}); mend the line"
                ) from None
            if not isinstance(row, dict):
                raise RecordError(
                    f"{path}:{number} is no object; found {line[:60]!r}; mend the line"
                )
            try:
                read_rows = steps(row)
            except RecordError as error:
                raise RecordError(f"{path}:{number}: {error}") from None
            yield from read_rows


def unseen(
    rows: Iterable[dict[str, str]], training: Iterable[dict[str, str]]
) -> list[dict[str, str]]:
    """Those rows whose prompt does not occur among the training rows (a third of GSM8K's test
    steps).
    """
    prompts = {row["prompt"] for row in training}
    return [row for row in rows if row["prompt"] not in prompts]


def reward(completion: str, answer: str) -> float:
    """1 if the completion is the answer's number, however it is written, and nothing else, else
    0.
    """
    return float(same_number(completion, answer))


def source(path: str, name: str, *, held_out: bool = False) -> Prompts:
    """The steps of a GSM8K file or data set as prompts, or made-up ones; one rollout of each
    held-out one.
    """
    size, seed = (1, None) if held_out else (None, 0)
    reader: Any = steps if path else None
    made_up = rows(2_000 if held_out else 24_000, seed=1, held_out=held_out)
    return Prompts(
        path or list(made_up),
        rows=reader,
        columns=("answer",),
        name=name,
        group_size=size,
        shuffle_seed=seed,
    )


def warm(
    policy: str | Path, prompts: str, *, steps: int = 180, layers: int = 4, width: int = 128
) -> Path:
    """The folder of a policy that was trained on so many batches of the steps in `prompts`, or
    made-up ones.
    """
    examples = read(prompts) if Path(prompts).is_file() else rows(24_000, seed=0)
    return warm_start(
        policy,
        examples=((row["prompt"], row["answer"]) for row in examples),
        alphabet=ALPHABET,
        layers=layers,
        width=width,
        heads=4,
        steps=steps,
        batch_size=128,
        seed=0,
    )
