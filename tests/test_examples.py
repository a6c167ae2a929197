"""Every public name has an example in its docstring, which runs, and needs no torch."""

import doctest
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dataflow
import operators
import operators.credit
import operators.environments
import operators.filters
import operators.rewards
from dataflow.scorer import Scorer

TYPES = {"Array", "Prompt", "Rollout"}
"""Of annotations alone: they are seen in the examples of others."""
SCORERS = [
    (module, name)
    for module in (operators.credit, operators.filters)
    for name, value in vars(module).items()
    if isinstance(value, Scorer)
]
PUBLIC = [
    *(
        (package, name)
        for package in (dataflow, operators)
        for name in package.__all__
        if name not in TYPES
    ),
    (operators.environments, "environment"),
    *(
        (operators.rewards, name)
        for name in operators.rewards.__all__
        if name not in ("KNOWN", "code_reward")
    ),
    *SCORERS,
]


def example(package: Any, name: str) -> doctest.DocTest:
    """The docstring of a public name as a test; what it does not import is the name itself."""
    known = getattr(package, name)
    return doctest.DocTestParser().get_doctest(known.__doc__ or "", {name: known}, name, None, 0)


@pytest.mark.parametrize(
    ("package", "name"), PUBLIC, ids=lambda each: getattr(each, "__name__", each)
)
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
        "parse, run = doctest.DocTestParser().get_doctest, doctest.DocTestRunner().run;"
        "[run(parse(getattr(operators, name).__doc__, {}, name, None, 0))"
        " for name in operators.__all__];"
        " print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False", done.stdout + done.stderr


def test_the_tooltip_of_a_picture_leaves_the_example_out() -> None:
    graph = dataflow.Graph("sums")
    graph.source(operators.Prompts(["2+2="]))
    picture = graph._repr_mimebundle_()["image/svg+xml"]
    assert "Issues prompts from" in picture and "&gt;&gt;&gt;" not in picture
