"""`math_verify`: whether a completion's answer equals the reference mathematically, by the package
of that name.
"""

import logging

from operators.rewards.packaged import PackagedScorer

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
