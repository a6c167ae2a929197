"""Laws of `code_reward`: what a program earns, what its row says, and that nothing runs without a
sandbox.
"""

import json
import re
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dataflow import Graph, GraphError, Model
from dataflow.records import ERROR
from dataflow.runtime import Batch, Context, Runtime
from dataflow.testing import FakeGenerator, FakePrompts
from operators.rewards import code, code_reward, find
from operators.rewards.code import Case, is_same_output, judge, program_in, read_cases
from operators.sandbox import CallTest, PythonTest, SandboxError, SandboxLimits, ScriptTest, fault
from operators.sandbox.bwrap import VARIABLE

needs_sandbox = pytest.mark.skipif(fault() is not None, reason=str(fault()))


ADD = "def add(a, b):\n    return a + b\n"


class Log:
    def warning(self, event: str, **facts: Any) -> None:
        """Swallowed."""


def scored(runtime: Runtime, rows: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that come back from a runtime."""
    runtime.push(Batch("prompts", pa.RecordBatch.from_pydict(rows)))
    deadline, found = time.monotonic() + 60, []
    while runtime.pending() and time.monotonic() < deadline:
        found += [row for batch in runtime.work() or () for row in batch.records.to_pylist()]
    runtime.close()
    return found


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# A refusal, on every machine


def apply(reward: Any) -> None:
    graph = Graph("t")
    prompts = FakePrompts(columns={"tests": str})
    reward(FakeGenerator(model=Model("policy"))(graph.source(prompts)))


@pytest.mark.parametrize("made", [lambda: code_reward(), lambda: find("code")])
def test_a_graph_is_refused_where_there_is_no_bubblewrap(
    monkeypatch: pytest.MonkeyPatch, made: Any
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        GraphError, match="needs bubblewrap.*is not on PATH; install bubblewrap.*never run"
    ):
        apply(made())


def test_a_graph_is_refused_where_the_named_bubblewrap_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "/nowhere/bwrap")
    with pytest.raises(
        GraphError, match=f"{VARIABLE} names '/nowhere/bwrap', which is no program; install"
    ):
        apply(code_reward())


def test_a_graph_is_refused_where_the_kernel_makes_no_namespaces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    monkeypatch.setenv(VARIABLE, program(tmp_path / "bwrap", text))
    with pytest.raises(
        GraphError, match="cannot make a sandbox.*No permissions to create new namespace.*sysctl"
    ):
        apply(code_reward())


def test_a_graph_is_refused_on_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(GraphError, match="a sandbox of Linux, but this is darwin; run it on Linux"):
        apply(code_reward())


def test_a_worker_without_a_sandbox_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/nowhere/bwrap")
    with pytest.raises(GraphError, match="which is no program"):
        code_reward().build(Context(node="reward", log=Log()))


def test_no_program_runs_without_a_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "/nowhere/bwrap")
    with pytest.raises(SandboxError, match="which is no program"):
        judge(f"open({str(tmp_path / 'ran')!r}, 'w')", json.dumps([{"input": "", "output": ""}]))
    assert not (tmp_path / "ran").exists()


def test_a_sandbox_that_fails_is_an_error_of_its_row_and_never_a_reward(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(
        VARIABLE, program(tmp_path / "bwrap", "#!/bin/sh\necho broken >&2\nexit 3\n")
    )
    monkeypatch.setattr(code, "fault", lambda: None)
    runtime = code_reward().build(Context(node="reward", log=Log()))
    (row,) = scored(
        runtime, {"completion": [ADD], "tests": [["assert add(1, 2) == 3"]], "group_id": [0]}
    )
    assert row["reward"] is None and row["reward_note"] is None
    assert "SandboxError: a sandbox ended with status 3; it said: broken" in row[ERROR]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"time_s": 0}, "time_s=0, which is no time"),
        ({"total_s": float("inf")}, "total_s=inf"),
        ({"memory_bytes": 1000}, "memory_bytes=1000, in which Python hardly starts"),
    ],
)
def test_limits_that_cannot_be_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        code_reward(**knobs)


# What is run, and what it is compared with


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        ("x = 1", "x = 1"),
        ("So:\n```python\nx = 1\n```\nor\n```py\nx = 2\n```\ndone", "x = 2\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("```python\nx = 1\n```\n```bash\nls\n```", "x = 1\n"),
    ],
)
def test_the_program_is_the_last_block_of_python_else_the_whole_text(
    completion: str, found: str
) -> None:
    assert program_in(completion) == found


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ("3\n", "3", True),
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1.50", "1.5", True),
        ("1e2", "100", True),
        ("1\n2", "1 2", False),
        ("YES", "yes", False),
        ("", "0", False),
        ("nan", "nan", True),
        ("9" * 5000, "9" * 5001, False),
        ("1e999999999", "1", False),
    ],
)
def test_outputs_are_compared_by_lines_words_and_the_value_of_numbers(
    found: str, wanted: str, same: bool
) -> None:
    assert is_same_output(found, wanted) is same


def test_the_tests_of_open_data_sets_are_read() -> None:
    mbpp = read_cases(["assert f(1) == 2", "assert f(2) == 3"])
    human_eval = read_cases("def check(candidate):\n    assert candidate(1) == 2\ncheck(f)")
    apps = read_cases(json.dumps({"inputs": ["1\n", ["2", "3"]], "outputs": ["a\n", ["b"]]}))
    live_code_bench = read_cases(json.dumps([{"input": "1\n", "output": "a", "testtype": "stdin"}]))
    called = read_cases(json.dumps({"fn_name": "f", "inputs": [[[1], "x"]], "outputs": [2]}))
    called_by_line = read_cases(json.dumps([{"fn_name": "f", "input": '[1]\n"x"', "output": "2"}]))
    assert [case.test for case in mbpp] == [
        PythonTest("assert f(1) == 2"),
        PythonTest("assert f(2) == 3"),
    ]
    assert len(human_eval) == 1 and isinstance(human_eval[0].test, PythonTest)
    assert [(case.test, case.expected) for case in apps] == [
        (ScriptTest("1\n"), "a\n"),
        (ScriptTest("2\n3"), "b"),
    ]
    assert [(case.test, case.expected) for case in live_code_bench] == [(ScriptTest("1\n"), "a")]
    assert called == called_by_line == [Case(CallTest("f", [[1], "x"], 2))]


@pytest.mark.parametrize("tests", [[], "", None, "[1]", '{"inputs": [1]}', '[{"input": "1"}]'])
def test_tests_that_cannot_be_read_are_an_error_and_no_reward(tests: Any) -> None:
    with pytest.raises(ValueError, match="test"):
        read_cases(tests)


# What a program earns, in a sandbox

SCRIPTS = json.dumps({"inputs": ["2\n1 2\n", "1\n5"], "outputs": ["3\n", "6"]})


SUM = "input()\nprint(sum(map(int, input().split())))"


TWICE = (
    "class Solution:\n    def twice(self, items):\n        return tuple(2 * item for item in items)"
)


SORT = "def sort(items):\n    items.sort()"


PAIR = (
    "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\ndef last(p):\n   "
    " return p[-1].b"
)


RAISES = "def f(x):\n    raise ValueError('negative')"


CAUGHT = (
    "try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert 'negative' in"
    " str(error)"
)


THREAD = (
    "import threading\nthreading.stack_size(1 << 26)\nthreading.Thread(target=lambda:"
    " print(input())).start()"
)


@needs_sandbox
@pytest.mark.parametrize(
    ("source", "tests", "reward", "note"),
    [
        (
            ADD,
            ["assert add(1, 2) == 3", "assert add(1, 1) == 3"],
            0.5,
            "1 of 2.*test 2: AssertionError in `assert add",
        ),
        (
            ADD,
            "def check(candidate):\n    assert abs(candidate(0.5, 1) - 1.5) < 1e-6\ncheck(add)",
            1.0,
            "1 of 1",
        ),
        (SUM, SCRIPTS, 0.5, r"test 2: printed '5\\n', not '6'"),
        (
            TWICE,
            json.dumps({"fn_name": "twice", "inputs": [[[1, 2]]], "outputs": [[2, 4]]}),
            1.0,
            "1 of 1",
        ),
        (SORT, ["a = [3, 1]\nsort(a)\nassert a == [1, 3]"], 1.0, "1 of 1"),
        (PAIR, ["assert last([Pair(1, 2), Pair(3, 4)]) == 4"], 1.0, "1 of 1"),
        ("def g(n):\n    yield from range(n)", ["assert list(g(3)) == [0, 1, 2]"], 1.0, "1 of 1"),
        (RAISES, [CAUGHT], 1.0, "1 of 1"),
        (ADD + "import math", ["assert math.isclose(add(1, 2), 3)"], 1.0, "1 of 1"),
        (THREAD, json.dumps([{"input": "7", "output": "7"}]), 1.0, "1 of 1"),
        ("def f(:", ["assert f(1)"], 0.0, "exited with status 1: SyntaxError"),
        ("1 / 0", json.dumps([{"input": "", "output": ""}]), 0.0, "ZeroDivisionError"),
        ("def f(x):\n    return [0] * 10**10", ["assert f(1)"], 0.0, "MemoryError"),
    ],
)
def test_a_program_earns_the_share_of_its_tests_that_it_passes(
    source: str, tests: Any, reward: float, note: str
) -> None:
    verdict = judge(source, tests)
    assert verdict.value == reward
    assert re.search(note, verdict.note), verdict.note


@needs_sandbox
@pytest.mark.parametrize(
    "wanted", ["Infinity", "-Infinity", "NaN", "true", "null", "[Infinity, NaN]"]
)
def test_a_program_that_names_a_literal_earns_nothing_and_the_right_one_all(wanted: str) -> None:
    tests = f'{{"fn_name": "f", "inputs": [[5]], "outputs": [{wanted}]}}'
    cheats = (
        "inf = nan = Infinity = NaN = true = null = 5\ndef f(x):\n    return"
        f" {5 if wanted[0] != '[' else [5, 5]}"
    )
    right = f"import json\ndef f(x):\n    return json.loads('{wanted}')"
    assert [judge(source, tests).value for source in (cheats, right)] == [0.0, 1.0]


@needs_sandbox
def test_where_all_must_pass_the_first_failure_is_the_last_test() -> None:
    tests = ["assert add(1, 2) == 3", "assert add(1, 1) == 3", "while True: add(1, 1)"]
    verdict = judge(ADD, tests, SandboxLimits(time_s=20.0), all_or_nothing=True)
    assert verdict.value == 0.0
    assert verdict.note.startswith("not all of 3 tests pass; test 2: AssertionError")


@needs_sandbox
def test_rows_come_back_with_a_reward_and_a_note() -> None:
    rows = {
        "completion": [f"Here:\n```python\n{ADD}```", "no program at all", ADD],
        "tests": [["assert add(1, 2) == 3"], ["assert add(1, 2) == 3"], []],
        "group_id": [0, 0, 0],
    }
    found = scored(code_reward(concurrency=2).build(Context(node="reward", log=Log())), rows)
    assert [row["reward"] for row in found] == [1.0, 0.0, None]
    assert found[0]["reward_note"] == "1 of 1 tests pass"
    assert "SyntaxError" in found[1]["reward_note"] and found[1][ERROR] is None
    assert "no tests" in found[2][ERROR]


@needs_sandbox
def test_called_with_plain_values_it_is_the_reward() -> None:
    assert code_reward()(completion=ADD, tests=["assert add(1, 2) == 3"]) == 1.0


@needs_sandbox
def test_a_graph_with_it_has_both_columns() -> None:
    graph = Graph("t")
    prompts = FakePrompts(columns={"tests": str})
    stream = code_reward(name="solved")(FakeGenerator(model=Model("policy"))(graph.source(prompts)))
    assert stream.columns["solved"] == pa.float64() and stream.columns["solved_note"] == pa.string()
