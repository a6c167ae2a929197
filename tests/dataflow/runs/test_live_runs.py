"""A run under way, in another process: looked at, exported and reported while it goes on, then
killed.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs_made import GROUP, PROMPTS

from dataflow import Run, cli
from dataflow.history.verify import verify
from dataflow.runs.listing import runs_in

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parent.parent.parent.parent


PROGRAM = """
import sys
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/tests", sys.argv[2] + "/tests/dataflow/runs"]
import runs_made
from rigs.operators import slow
from dataflow import Model
from dataflow.testing import FakePrompts, FakeTrainer
from pathlib import Path
trainer = slow(FakeTrainer(model=Model("fake-policy"), prompts_per_step=runs_made.PROMPTS), 0.02)
source = FakePrompts(size=None)
runs_made.one_run(Path(sys.argv[1]), steps=int(sys.argv[3]), trainer=trainer, source=source)
"""


def started(runs: Path, steps: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(runs), str(ROOT), str(steps)])


def test_a_live_run_is_looked_at_without_a_trace_and_a_killed_one_has_died(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with started(runs, 100_000) as process:
        deadline = time.monotonic() + 60
        while not list(runs.glob("*/metrics.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.05)
        seen, rows = Run(runs / "latest"), []
        while seen.steps().num_rows < 2:
            assert time.monotonic() < deadline, "no second step was made"
            time.sleep(0.05)
        shown = seen._repr_html_()
        assert (
            "<dt>state</dt><dd>running</dd>" in shown and "generator" in shown and "<svg" in shown
        )
        for number in range(4):
            (listed,) = runs_in(runs).runs
            assert (listed.state.word, seen.state) == ("running", "running")
            rows.append(seen.rollouts(columns=["step", "group_id"]).num_rows)
            assert rows[-1] % (PROMPTS * GROUP) == 0, "no half of a step"
            cli.export_run(runs / "latest", to="hf", out=tmp_path / f"data-{number}")
            cli.report_run(runs / "latest", out=tmp_path / "report.html")
            time.sleep(0.3)
        assert rows == sorted(rows) and rows[-1] > rows[0], "it goes on meanwhile"
        assert process.poll() is None
        process.kill()
    (listed,) = runs_in(runs).runs
    assert listed.state.word == "died"
    assert verify(runs / "latest").clean


def test_a_run_that_was_looked_at_all_the_time_ends_as_any_other(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with started(runs, 40) as process:
        while process.poll() is None:
            if (runs / "latest").exists():
                runs_in(runs)
                Run(runs / "latest").rollouts(columns=["step"])
        assert process.returncode == 0
    assert Run(runs / "latest").state == "finished"
    assert verify(runs / "latest").clean
