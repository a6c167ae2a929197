"""A new algorithm as a user would write it: one short file outside the packages that runs, and
learns.
"""

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from dataflow import verify
from dataflow.folder.run_folder import RunFolder
from operators.warm_start import warm_start

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "rigs" / "user_algorithm.py"
LETTERS = "abcdef"


def tasks() -> list[dict[str, str]]:
    """Put three letters in order."""
    words = ["".join(word) for word in itertools.permutations(LETTERS, 3)]
    random.Random(0).shuffle(words)
    return [{"prompt": f"{word}=", "answer": "".join(sorted(word))} for word in words]


def test_the_file_has_fewer_than_fifty_lines() -> None:
    assert len(FILE.read_text().splitlines()) < 50


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_algorithm_of_ones_own_runs_and_learns_in_a_folder_of_ones_own(tmp_path: Path) -> None:
    rows = tasks()
    policy = warm_start(
        tmp_path / "policy",
        examples=[(row["prompt"], row["answer"]) for row in rows],
        alphabet=LETTERS + "=",
        layers=1,
        width=64,
        heads=2,
        steps=18,
        seed=0,
        max_positions=16,
        learning_rate=2e-3,
    )
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_algorithm.py").write_text(FILE.read_text())
    flags = [
        "--policy",
        str(policy),
        "--prompts",
        "prompts.jsonl",
        "--inline",
        "--quiet",
        "--runs",
        "runs",
    ]
    done = subprocess.run(
        [sys.executable, "my_algorithm.py", *flags],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    assert verify(folder).clean, verify(folder).line
    lines = [line for line in RunFolder.open(folder).read_metrics() if "loss" in line]
    assert len(lines) == 12
    rewards = [line["reward_mean"] for line in lines]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.5, rewards
    assert {reason for line in lines for reason in line["dropped"]} == {"undecided"}
