"""A run on a real Slurm cluster of three nodes on loopback: submitted, put back in its midst,
resumed, and ended.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rigs.launchers import launched
from rigs.launchers.slurm import Cluster, slurm

from dataflow.history.verify import verify
from dataflow.launchers.submit import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = 60


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with slurm(tmp_path / "slurm", nodes=3) as found:
        for name, value in {**found.environment, "OMP_NUM_THREADS": "1"}.items():
            monkeypatch.setenv(name, value)
        yield found


def until(is_so: Callable[[], bool], what: str, log: Path, within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        said = (
            {each.name: each.read_text()[-800:] for each in log.glob("*.log")}
            if log.is_dir()
            else {}
        )
        assert time.monotonic() < deadline, f"waited {within_s:.0f} s for {what}; {said}"
        time.sleep(0.2)


def steps_made(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def test_a_job_that_is_put_back_goes_on_with_its_run(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    command = (sys.executable, launched.__file__, "--steps", str(STEPS), "--quiet")
    assert launch(command, slurm=True, nodes=3, runs=tmp_path / "runs") == 0
    number = capsys.readouterr().out.split("job ")[1].partition(";")[0]
    folder = tmp_path / "runs" / f"slurm-{number}"
    run = folder / "latest"
    until(lambda: steps_made(run) >= 5, "five steps", folder / "logs")
    begun = os.path.realpath(run)
    cluster.ask("scontrol", "requeue", number)
    until(
        lambda: (folder / "logs" / "attempt-1.log").exists(), "the second attempt", folder / "logs"
    )
    assert steps_made(run) < STEPS, "it was put back in its midst"
    until(lambda: cluster.job(number)["JobState"] == "COMPLETED", "the job's end", folder / "logs")
    assert os.path.realpath(run) == begun and steps_made(run) == STEPS
    assert verify(run).clean
    assert {each.name for each in (run / "logs").glob("agent-*.log")} == {
        f"agent-n{n}.log" for n in (1, 2, 3)
    }
    assert not list(run.glob("agents.*")), "nobody has its keys any more"
    assert cluster.ask("squeue", "-h") == ""
