"""A run on a real Ray cluster of three nodes on loopback; what it asks for, what it leaves, and
what cannot be had.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rigs.launchers import launched
from rigs.launchers.joining import JOIN
from rigs.launchers.ray_cluster import ENVIRONMENT, RayCluster, ray_cluster

from dataflow.errors import RunError
from dataflow.history.verify import verify
from dataflow.launchers.named import OnRay, ray

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(nodes=3, cores=1) as found:
        yield found


@pytest.fixture
def environment(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in {
        **ENVIRONMENT,
        "RAY_ADDRESS": cluster.address,
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def ran(folder: Path, steps: int) -> None:
    """A run has come to its end, with an agent on each of three nodes; nobody has its keys any
    more.
    """
    latest = folder / "latest"
    assert json.loads((latest / "metrics.jsonl").read_text().splitlines()[-1])["step"] == steps
    assert verify(latest).clean
    assert len(list((latest / "logs").glob("agent-*.log"))) == 3
    assert not list(latest.glob("agents.*"))


def test_the_demo_runs_on_three_nodes(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "graphs.sorting", "--steps", "2", "--quiet", "--on", "ray"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran(tmp_path / "runs", 2)


def test_a_job_of_ray_brings_its_program_along_and_finds_all_cores_free_again(
    environment: dict[str, str], cluster: RayCluster, tmp_path: Path
) -> None:
    """Each node has one core: had a run before left its placement, this one would wait in vain."""
    (tmp_path / "program").mkdir()
    shutil.copy(launched.__file__, tmp_path / "program" / "mine.py")
    runs = str(tmp_path / "runs")
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "job",
        "submit",
        "--address",
        cluster.dashboard,
        "--working-dir",
        str(tmp_path / "program"),
        "--",
        sys.executable,
        "mine.py",
        "--steps",
        "3",
        "--quiet",
        "--on",
        "ray:3",
        "--runs",
        runs,
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran(tmp_path / "runs", 3)
    launch = json.loads((tmp_path / "runs" / "latest" / "config.json").read_text())["launch"]
    assert not Path(launch["file"]).is_relative_to(tmp_path), "it ran where Ray has put it"


def first_said(launcher: OnRay) -> str:
    """The first that it tells of its agents, once it was started."""
    try:
        launcher.start(JOIN)
        deadline = time.monotonic() + 60
        while not (said := launcher.ended()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return said[0]
    finally:
        launcher.stop()


def test_a_placement_that_cannot_be_had_ends_with_what_was_asked_and_what_there_is(
    environment: dict[str, str],
) -> None:
    launcher = ray(hosts=4, wait_s=20.0)
    assert (launcher.hosts, launcher.listen) == (4, "127.0.0.1")
    said = first_said(launcher)
    assert "Ray did not find 4 hosts with 1 CPU each within 20 s; there are 4 hosts: " in said
    assert said.count("with 1 CPU (1 CPU free)") == 3


@pytest.mark.parametrize("outside", [False, True])
def test_an_agent_that_cannot_join_is_told_with_its_own_words(
    environment: dict[str, str], cluster: RayCluster, outside: bool
) -> None:
    """The run folder of JOIN can be nowhere; the driver is a part of the cluster, or a client of
    it.
    """
    launcher = ray(cluster.client if outside else "auto", hosts=1, wait_s=90.0)
    assert launcher.listen == "127.0.0.1"
    said = first_said(launcher)
    assert (
        "ended with status 2" in said and "making '/dev/null/run' failed: Not a directory" in said
    )


def test_a_cluster_that_is_not_there_is_told(environment: dict[str, str]) -> None:
    launcher = ray("127.0.0.1:1", wait_s=5.0)
    began = time.monotonic()
    with pytest.raises(
        RunError, match=r"the Ray cluster at '127.0.0.1:1'|no Ray cluster at '127.0.0.1:1'"
    ):
        _ = launcher.hosts
    assert time.monotonic() - began < 30


def test_a_node_that_joins_gets_an_agent_in_place_of_one_that_died(
    environment: dict[str, str], cluster: RayCluster, tmp_path: Path
) -> None:
    command = [sys.executable, launched.__file__, "--steps", "1000000", "--quiet", "--on", "ray"]
    run = tmp_path / "runs" / "latest"

    def steps() -> int:
        lines = (
            (run / "metrics.jsonl").read_text().splitlines()
            if (run / "metrics.jsonl").exists()
            else []
        )
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def agents() -> int:
        return len(list((run / "logs").glob("agent-*.log")))

    with (tmp_path / "said").open("wb") as said:
        program = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=said, stderr=said)
    try:
        until(lambda: steps() >= 5, program, tmp_path / "said")
        assert agents() == 3
        cluster.lose()
        cluster.gain()
        until(lambda: agents() == 4, program, tmp_path / "said")
        made = steps()
        until(lambda: steps() >= made + 5, program, tmp_path / "said")
        program.send_signal(signal.SIGINT)
        assert program.wait(60) == 0, (tmp_path / "said").read_text()
    finally:
        program.kill()
        program.wait()
    assert verify(run).clean


def until(is_so: Callable[[], bool], program: "subprocess.Popen[bytes]", said: Path) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert program.poll() is None and time.monotonic() < deadline, said.read_text()
        time.sleep(0.2)
