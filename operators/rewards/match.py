"""Whether a completion is the reference answer: to the letter, or as a number."""

import re
from fractions import Fraction

_NUMBER = re.compile(r"([-+]?)\$?((?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?)\.?(%?)", re.ASCII)


def exact(completion: str, answer: str) -> float:
    """1 if the completion is the answer, blanks around it aside, else 0.

    >>> exact(" abdg ", "abdg"), exact("abdg!", "abdg")
    (1.0, 0.0)
    """
    return float(completion.strip() == answer.strip())


def number(completion: str, answer: str) -> float:
    """1 if the last number in the completion equals the last one in the answer (`#### 1,200` is
    `1200.0`), else 0.

    >>> number("12 of 48 are left: $36.00", "#### 36"), number("none", "36")
    (1.0, 0.0)
    """
    expected = last_number(answer)
    return float(expected is not None and last_number(completion) == expected)


def last_number(text: str) -> Fraction | None:
    """The exact value of the last number in a text, or None where there is none."""
    matches = [match for match in _NUMBER.finditer(text) if match[2]]
    if not matches:
        return None
    sign, digits, percent = matches[-1].groups()
    value = Fraction(digits.replace(",", ""))
    return value * (-1 if sign == "-" else 1) / (100 if percent else 1)
