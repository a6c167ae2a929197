"""`code_reward`: runs the program in a completion against its row's tests, in a sandbox and nowhere
else.
"""

import json
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from dataflow.errors import GraphError
from dataflow.runtime import Context, Runtime
from dataflow.scorer import Scorer
from dataflow.scoring.signature import Noted
from operators.sandbox import (
    CallTest,
    PythonTest,
    SandboxLimits,
    SandboxResult,
    ScriptTest,
    Test,
    fault,
    run,
)

# A row's tests of a program, in the forms that open data sets give them, and whether an output is
# the right one.

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
    expected: str | None = None

    def fault(self, outcome: SandboxResult) -> str:
        """Why it failed; empty where it passed."""
        if (
            not outcome.passed
            or self.expected is None
            or is_same_output(outcome.output, self.expected)
        ):
            return outcome.note
        return f"printed {_shown(outcome.output)}, not {_shown(self.expected)}"


def program_in(completion: str) -> str:
    """The last block of Python between ``` in a text, closed or not; the whole text where there is
    none.
    """
    blocks = _BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def read_cases(tests: Any) -> list[Case]:
    """The cases of a row.

    tests: a list of assertions (MBPP), each a test of its own; Python text (HumanEval's `test` with
    its call of `check`), one test; or JSON: {"inputs": [...], "outputs": [...]} with "fn_name"
    where a function is called (APPS), or [{"input": ..., "output": ...}, ...], each with "fn_name"
    where one is called (LiveCodeBench). Raises ValueError for anything else, and for no tests at
    all.
    """
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


def is_same_output(output: str, expected: str) -> bool:
    """Whether two outputs have the same lines of the same words, where numbers are compared by
    their value.

    Blanks at the ends of lines and empty lines at the end are no difference.
    """
    ours, theirs = (
        [line.split() for line in text.rstrip().splitlines()] for text in (output, expected)
    )
    return len(ours) == len(theirs) and all(
        len(mine) == len(yours) and all(map(_is_same_word, mine, yours))
        for mine, yours in zip(ours, theirs, strict=True)
    )


def _is_same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if max(len(word), len(expected)) > _LONGEST_NUMBER:
        return False
    try:
        return Decimal(word) == Decimal(expected)
    except InvalidOperation:
        return False


def _from_json(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, list | dict) else [text] if text.strip() else []


def _columns_as_rows(tests: dict[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f'tests as JSON have {list(tests)}; give as many "inputs" as "outputs"')
    name = tests.get("fn_name")
    return [
        {"input": test_input, "output": expected, "fn_name": name}
        for test_input, expected in zip(inputs, outputs, strict=True)
    ]


def _case(test: Any) -> Case:
    if isinstance(test, str):
        return Case(PythonTest(test))
    if not isinstance(test, dict) or "input" not in test or "output" not in test:
        raise ValueError(
            f'a test is {_shown(test)}; give Python text, or {{"input": ..., "output": ...}}'
        )
    test_input, expected, name = test["input"], test["output"], test.get("fn_name")
    if not name:
        return Case(ScriptTest(_lines(test_input)), _lines(expected))
    arguments = (
        [json.loads(line) for line in test_input.splitlines()]
        if isinstance(test_input, str)
        else list(test_input)
    )
    expected = (
        json.loads(expected)
        if isinstance(test_input, str) and isinstance(expected, str)
        else expected
    )
    return Case(CallTest(name, arguments, expected))


def _lines(text: str | Sequence[str]) -> str:
    return text if isinstance(text, str) else "\n".join(map(str, text))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


_DEFAULT = SandboxLimits()
_MARGIN_S = 30.0
_LEAST_BYTES = 64 << 20


def judge(
    program: str, tests: Any, limits: SandboxLimits = _DEFAULT, *, all_or_nothing: bool = False
) -> Noted:
    """Run a program against tests (see `read_cases`) in one sandbox; with `all_or_nothing`, up to
    the first failure. The value is the share of tests that passed, or 1 or 0 where all must pass;
    the note says how many passed, and why the first that did not failed.

    A program that fails, crashes, hangs or takes too much has the reward it earned until then.
    Raises SandboxError where there is no sandbox or where it fails itself, and ValueError for tests
    that cannot be read.
    """
    cases = read_cases(tests)
    passed, first = 0, ""
    with closing(run(program, [case.test for case in cases], limits)) as outcomes:
        for number, (case, outcome) in enumerate(zip(cases, outcomes, strict=True), 1):
            wrong = case.fault(outcome)
            passed += not wrong
            first = first or (f"; test {number}: {wrong}" if wrong else "")
            if wrong and all_or_nothing:
                return Noted(0.0, f"not all of {len(cases)} tests pass{first}")
    return Noted(passed / len(cases), f"{passed} of {len(cases)} tests pass{first}")


class CodeScorer(Scorer[..., Any]):
    """A scorer whose function gives notes; refused where there is no sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply it to a stream; or call it with a completion and its tests, for the reward."""
        result = super().__call__(*args, **kwargs)
        return result.value if isinstance(result, Noted) else result

    def faults(self) -> list[str]:
        """Those of any scorer, and that no program could run in a sandbox here."""
        return [*super().faults(), *filter(None, [fault()])]

    def build(self, context: Context) -> Runtime:
        """Its runtime; GraphError where this worker's machine has no sandbox."""
        if (wrong := fault()) is not None:
            raise GraphError(wrong)
        return super().build(context)


def code_reward(
    *,
    name: str = "reward",
    all_or_nothing: bool = False,
    time_s: float = _DEFAULT.time_s,
    total_s: float = _DEFAULT.total_s,
    memory_bytes: int = _DEFAULT.memory_bytes,
    concurrency: int = 4,
) -> Scorer[..., Any]:
    """A scorer that writes the share of a row's tests that the Python program in its completion
    passes.

        scored = code_reward(time_s=2.0)(rollouts)

    Reads `completion` (its last block of Python, or all of it) and `tests` (see `read_cases`).
    Writes columns `name` and `<name>_note`, which says how many tests passed and why the first
    failed. Each program runs in a sandbox of its own (docs/sandbox.md); one that crashes, hangs or
    takes too much fails its test. Where the sandbox itself fails, the row has an error and no
    reward.

    all_or_nothing: 1 if every test passes, else 0; tests after the first failure are not run.
    time_s: seconds of CPU for one test, and five times as many on the clock. total_s: seconds on
    the clock for all tests. memory_bytes: address space. concurrency: sandboxes at once.
    Raises GraphError for limits that cannot be, and, when applied, where this machine has no
    sandbox.
    """
    for knob, value in (("time_s", time_s), ("total_s", total_s)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise GraphError(
                f"code_reward has {knob}={value!r}, which is no time; give seconds above 0"
            )
    if (
        isinstance(memory_bytes, bool)
        or not isinstance(memory_bytes, int)
        or memory_bytes < _LEAST_BYTES
    ):
        raise GraphError(
            f"code_reward has memory_bytes={memory_bytes!r}, in which Python hardly starts; give"
            f" {_LEAST_BYTES} or more"
        )
    reward = CodeScorer(
        function=_judged,
        name=name,
        timeout_s=total_s + _MARGIN_S,
        memory_mb=max(1024, memory_bytes >> 20),
        concurrency=concurrency,
    )
    return reward.configured(
        all_or_nothing=all_or_nothing, time_s=time_s, total_s=total_s, memory_bytes=memory_bytes
    )


def _judged(
    completion: str,
    tests: Any,
    all_or_nothing: bool = False,
    time_s: float = _DEFAULT.time_s,
    total_s: float = _DEFAULT.total_s,
    memory_bytes: int = _DEFAULT.memory_bytes,
) -> Noted:
    """The reward and the note."""
    limits = SandboxLimits(time_s=time_s, total_s=total_s, memory_bytes=memory_bytes)
    return judge(program_in(completion), tests, limits, all_or_nothing=all_or_nothing)
