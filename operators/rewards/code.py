"""`code_reward`: runs the program in a completion against its row's tests, in a sandbox and nowhere
else."""

from contextlib import closing
from dataclasses import dataclass
from typing import Any

from dataflow.errors import GraphError
from dataflow.runtime import Context, Runtime
from dataflow.scorer import Scorer
from dataflow.scoring.signature import Noted
from operators.rewards.code_tests import program_in, read_cases
from operators.sandbox import SandboxLimits, fault, run

_DEFAULT = SandboxLimits()
_MARGIN_S = 30.0
_LEAST_BYTES = 64 << 20


@dataclass(frozen=True)
class CodeVerdict:
    """What became of a program."""

    reward: float
    """The share of tests that passed, or 1 or 0 where all must pass."""
    note: str
    """How many passed, and why the first that did not failed."""


def judge(
    program: str, tests: Any, limits: SandboxLimits = _DEFAULT, *, all_or_nothing: bool = False
) -> CodeVerdict:
    """Run a program against tests (see `read_cases`) in one sandbox; with `all_or_nothing`, up to
    the first failure.

    A program that fails, crashes, hangs or takes too much has the reward it earned until then.
    Raises SandboxError where there is no sandbox or where it fails itself, and ValueError for tests
    that cannot be read."""
    cases = read_cases(tests)
    passed, first = 0, ""
    with closing(run(program, [case.test for case in cases], limits)) as outcomes:
        for number, (case, outcome) in enumerate(zip(cases, outcomes, strict=True), 1):
            wrong = case.fault(outcome)
            passed += not wrong
            first = first or (f"; test {number}: {wrong}" if wrong else "")
            if wrong and all_or_nothing:
                return CodeVerdict(0.0, f"not all of {len(cases)} tests pass{first}")
    return CodeVerdict(passed / len(cases), f"{passed} of {len(cases)} tests pass{first}")


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
    sandbox."""
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
    made = CodeScorer(
        function=_judged,
        name=name,
        timeout_s=total_s + _MARGIN_S,
        memory_mb=max(1024, memory_bytes >> 20),
        concurrency=concurrency,
    )
    return made.configured(
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
    verdict = judge(program_in(completion), tests, limits, all_or_nothing=all_or_nothing)
    return Noted(verdict.reward, verdict.note)
