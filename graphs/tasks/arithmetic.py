"""Numbers and arithmetic as text, read exactly: `.2`, `1,000`, `50%`, `3/4`, `2*(3+4)`."""

from __future__ import annotations

import re
from fractions import Fraction

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
