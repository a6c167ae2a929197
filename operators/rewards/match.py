"""Whether a completion is the reference answer: to the letter, as a number, or mathematically."""

import importlib.util
import logging
import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ParamSpec, TypeVar

from dataflow.scorer import Scorer

P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class PackagedScorer(Scorer[P, T_co]):
    """A scorer whose function imports a package when it is called."""

    package: str = field(repr=False)
    """As it is imported."""
    extra: str = field(repr=False)
    """That installs it."""

    def faults(self) -> list[str]:
        """Those of any scorer, and that the package is not there."""
        faults = super().faults()
        if importlib.util.find_spec(self.package) is None:
            faults.append(
                f"'{self.name}' imports '{self.package}', which is not installed; pip install "
                f'"dataflow-rl[{self.extra}]"'
            )
        return faults


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


_FINAL = "####"
"""What stands in front of the answer in GSM8K."""


def _math_verify(completion: str, answer: str) -> float | None:
    """1 if the answer in a completion equals the reference mathematically, else 0; None where that
    cannot be read.

    Both are read by the package math-verify: LaTeX in $...$ or \\boxed{...}, else the last
    expression; of a reference as GSM8K has it, what follows ####. It runs in a process of its own,
    as reading some texts does not end: such a rollout has an error, with the cause `hung`.

    >>> from operators.rewards import math_verify
    >>> math_verify.timeout_s, list(math_verify.reads())
    (20.0, ['completion', 'answer'])
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        # that it keeps no time limit: its process is ended instead
        logging.getLogger(name).setLevel(logging.ERROR)
    configs = (LatexExtractionConfig(), ExprExtractionConfig())
    expected = parse(_as_latex(answer.rpartition(_FINAL)[2].strip()), configs, parsing_timeout=None)
    if not expected:
        return None
    answers = parse(completion, configs, parsing_timeout=None)
    return float(bool(answers) and verify(expected, answers, timeout_seconds=None))


math_verify = PackagedScorer(
    function=_math_verify, name="math_verify", package="math_verify", extra="math", timeout_s=20.0
)
"""It as a scorer."""


def _as_latex(text: str) -> str:
    """A reference between $, as the package expects LaTeX; unchanged where it has marks of
    its own.
    """
    return text if any(mark in text for mark in ("$", "\\boxed", "\\(", "\\[")) else f"${text}$"
