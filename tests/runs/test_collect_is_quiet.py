"""`collect` in a process of the user's prints nothing, unless something is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from dataflow import Graph, Model, collect, scorer
from operators import Generator, Prompts

@scorer
def reward(completion: str) -> float:
    return float(len(completion))

if __name__ == "__main__":
    rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(8)] + ROWS
    prompts = Prompts(rows, columns=("answer",), on_bad="drop")
    generator = Generator(Model(sys.argv[1]), max_tokens=4, group_size=2)
    rollouts = generator(Graph("quiet").source(prompts))
    assert collect(reward(rollouts), rows=8).num_rows == 8
"""


def said(policy: Path, rows: str) -> tuple[str, str]:
    program = PROGRAM.replace("ROWS", rows)
    done = subprocess.run(
        [sys.executable, "-c", program, str(policy)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("fresh")
def test_rows_that_are_well_are_collected_without_a_word(policy: Path) -> None:
    assert said(policy, "[]") == ("", "")


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forked")
def test_a_row_that_is_left_out_is_told_of_on_standard_error(policy: Path) -> None:
    out, err = said(policy, '[{"prompt": 7, "answer": "x"}]')
    assert out == "" and "prompts left out" in err and "node=" in err
