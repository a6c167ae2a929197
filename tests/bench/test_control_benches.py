"""The benches of what one process does for many: a scheduler for its workers, rank 0 of a trainer
for its ranks.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 240.0


def lines_of(module: str, path: Path, *flags: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", module, *flags, "--json", str(path)]
    subprocess.run(command, check=True, timeout=WAIT_S, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_dealt_on_one_host_and_over_several(tmp_path: Path) -> None:
    size = ("--ranks", "4", "--rollouts", "16", "--tokens", "64", "--tensor-parallel", "2")
    lines = lines_of("bench.dealing", tmp_path / "lines", *size, "--per-host", "2")
    assert [line["case"] for line in lines] == ["one host", "hosts"]
    for line in lines:
        assert 0 < line["last s"] < WAIT_S and line["word s"] > 0


@pytest.mark.slow
def test_a_scheduler_of_32_ranks_hears_four_workers_on_four_hosts(tmp_path: Path) -> None:
    flags = ("--ranks", "32", "--seconds", "2", "--workers")
    (line,) = lines_of("bench.controller", tmp_path / "lines", *flags)
    assert line["system"] == "32 ranks" and line["hosts"] == 4 and not line["restarts"]
    assert line["messages/s"] > 0 and line["decisions"] > 0
    assert 0 < line["commit median ms"] <= line["commit p99 ms"]
