"""Programs with the packages of OpenAI and of Anthropic, which import nothing of the product, teach
a policy in a run.

Their interpreter is named by AGENT_PYTHON; without it, it is the one that runs the tests.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from dataflow import run
from graphs.played_by_programs import build

PYTHON = os.environ.get("AGENT_PYTHON", sys.executable)
CLIENTS: tuple[Literal["openai", "anthropic"], ...] = ("openai", "anthropic")


def has(package: str) -> bool:
    return (
        subprocess.run(
            [PYTHON, "-c", f"import {package}"], capture_output=True, timeout=60
        ).returncode
        == 0
    )


@pytest.mark.parametrize("client", CLIENTS)
def test_the_programs_import_nothing_of_this_project(client: str) -> None:
    text = (Path(__file__).parents[2] / "graphs" / "agents" / f"guess_with_{client}.py").read_text()
    imported = {
        line.split()[1].split(".")[0]
        for line in text.splitlines()
        if line.startswith(("import", "from"))
    }
    assert imported <= {"json", "sys", "typing", client}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_policy_learns_from_an_unchanged_program(
    client: Literal["openai", "anthropic"], tmp_path: Path
) -> None:
    """Of held-out games it wins more, by a fifth of them at least."""
    if not has(client):
        pytest.skip(f"{PYTHON} has no package {client}; name one that has: AGENT_PYTHON=...")
    graph = build(client=client, python=PYTHON, policy=str(tmp_path / "policy"))
    result = run(graph, steps=40, runs=tmp_path / "runs", quiet=True)
    assert result.verdict.clean, result.verdict.line
    won = [
        line["eval_accuracy"] for line in result.metrics if line.get("eval_accuracy") is not None
    ]
    assert won[-1] - won[0] >= 0.2, won
