"""Every public name has an example in its docstring, which runs, and needs no torch."""

import doctest
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dataflow
import operators

TYPES = {"Array", "Prompt", "Rollout", "Devices", "Plan", "plan"}
"""Of annotations alone: they are seen in the examples of others."""
PUBLIC = [(package, name) for package in (dataflow, operators) for name in package.__all__ if name not in TYPES]


def example(package: Any, name: str) -> doctest.DocTest:
    """The docstring of a public name as a test, with nothing imported that it does not import."""
    return doctest.DocTestParser().get_doctest(getattr(package, name).__doc__ or "", {}, name, None, 0)


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=lambda each: getattr(each, "__name__", each))
def test_the_example_of_a_public_name_runs(
    package: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    found = example(package, name)
    assert found.examples, f"{package.__name__}.{name} has no example"
    assert doctest.DocTestRunner().run(found, out=said.append).failed == 0, "".join(said)


def test_examples_of_declarations_need_no_torch() -> None:
    program = (
        "import sys, doctest, operators;"
        "[doctest.DocTestRunner().run(doctest.DocTestParser().get_doctest(getattr(operators, name).__doc__, {}, name,"
        " None, 0)) for name in operators.__all__]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stdout + done.stderr
