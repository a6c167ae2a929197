"""A row's tests of a program, in the forms that open data sets give them, and whether an output is
the right one."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from operators.sandbox import CallTest, PythonTest, SandboxResult, ScriptTest, Test

_BLOCK = re.compile(
    r"^[ \t]*```(?:python3?|py)?[ \t]*\n(.*?)(?:^[ \t]*```|\Z)",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
_LONGEST_NUMBER = 60
_SHOWN = 80


@dataclass(frozen=True)
class Case:
    """One test, with the output that a script should have; None where the test itself decides."""

    test: Test
    wanted: str | None = None

    def fault(self, outcome: SandboxResult) -> str:
        """Why it failed; empty where it passed."""
        if not outcome.passed or self.wanted is None or is_same_output(outcome.output, self.wanted):
            return outcome.note
        return f"printed {_shown(outcome.output)}, not {_shown(self.wanted)}"


def program_in(completion: str) -> str:
    """The last block of Python between ``` in a text, closed or not; the whole text where there is
    none."""
    blocks = _BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def read_cases(tests: Any) -> list[Case]:
    """The cases of a row.

    tests: a list of assertions (MBPP), each a test of its own; Python text (HumanEval's `test` with
    its call of `check`), one test; or JSON: {"inputs": [...], "outputs": [...]} with "fn_name"
    where a function is called (APPS), or [{"input": ..., "output": ...}, ...], each with "fn_name"
    where one is called (LiveCodeBench). Raises ValueError for anything else, and for no tests at
    all."""
    if isinstance(tests, str):
        tests = _from_json(tests)
    if isinstance(tests, dict):
        tests = _columns_as_rows(tests)
    cases = [_case(test) for test in tests or ()]
    if not cases:
        raise ValueError(
            "the row has no tests, so nothing can be said of its program; leave such rows out"
        )
    return cases


def is_same_output(found: str, wanted: str) -> bool:
    """Whether two outputs have the same lines of the same words, where numbers are compared by
    their value.

    Blanks at the ends of lines and empty lines at the end are no difference.
    """
    ours, theirs = (
        [line.split() for line in text.rstrip().splitlines()] for text in (found, wanted)
    )
    return len(ours) == len(theirs) and all(
        len(mine) == len(yours) and all(map(_is_same_word, mine, yours))
        for mine, yours in zip(ours, theirs, strict=True)
    )


def _is_same_word(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    if max(len(found), len(wanted)) > _LONGEST_NUMBER:
        return False
    try:
        return Decimal(found) == Decimal(wanted)
    except InvalidOperation:
        return False


def _from_json(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, list | dict) else [text] if text.strip() else []


def _columns_as_rows(tests: dict[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f'tests as JSON have {list(tests)}; give as many "inputs" as "outputs"')
    name = tests.get("fn_name")
    return [
        {"input": given, "output": wanted, "fn_name": name}
        for given, wanted in zip(inputs, outputs, strict=True)
    ]


def _case(test: Any) -> Case:
    if isinstance(test, str):
        return Case(PythonTest(test))
    if not isinstance(test, dict) or "input" not in test or "output" not in test:
        raise ValueError(
            f'a test is {_shown(test)}; give Python text, or {{"input": ..., "output": ...}}'
        )
    given, wanted, name = test["input"], test["output"], test.get("fn_name")
    if not name:
        return Case(ScriptTest(_lines(given)), _lines(wanted))
    arguments = (
        [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else list(given)
    )
    wanted = json.loads(wanted) if isinstance(given, str) and isinstance(wanted, str) else wanted
    return Case(CallTest(name, arguments, wanted))


def _lines(text: str | Sequence[str]) -> str:
    return text if isinstance(text, str) else "\n".join(map(str, text))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
