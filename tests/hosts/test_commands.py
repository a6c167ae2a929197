"""Commands to a run that another host leads: they ask its scheduler, or look at its folder and say
what they miss.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rigs.hosts import Host
from rigs.hosts.cluster import Cluster
from rigs.machine import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def dataflow(
    host: Host, command: str, cluster: Cluster, *more: str
) -> subprocess.CompletedProcess[str]:
    return host.run(
        [sys.executable, "-m", "dataflow", command, cluster.run_folder, *more], timeout_s=120.0
    )


def test_commands_work_from_a_host_that_does_not_lead_the_run(
    make_cluster: Callable[..., Cluster], policy: Path
) -> None:
    cluster = make_cluster("a", "b", "c", visible=[policy])
    c = cluster.hosts[2]
    place = {"generator": ("a", "b"), "trainer": "a"}
    cluster.start(
        "tiny", {"policy": str(policy)}, steps=5000, replicas={"generator": 2}, place=place
    )
    cluster.wait_for_step(3)
    doctor = dataflow(c, "doctor", cluster)
    assert doctor.returncode == 0 and "generator-1" in doctor.stdout and "step" in doctor.stdout, (
        doctor.stderr
    )
    scaled = dataflow(c, "scale", cluster, "generator=1")
    assert scaled.returncode == 0 and "generator:" in scaled.stdout, scaled.stderr
    wait_until(
        lambda: dataflow(c, "scale", cluster, "generator=1").stdout.strip() == "generator: 1 live",
        60.0,
    )
    swapped = dataflow(c, "swap", cluster, "reward=rigs.graphs:reward")
    assert (
        swapped.returncode == 0 and "'reward' is 'rigs.graphs:reward' from now on" in swapped.stdout
    ), swapped.stderr
    for command in ("verify", "show"):
        looked = dataflow(c, command, cluster)
        assert looked.returncode == 0 and "clean" in looked.stdout, looked.stdout + looked.stderr
        assert "host 'a' leads this run" in looked.stdout
    assert "host 'a' leads this run" not in dataflow(cluster.hosts[0], "verify", cluster).stdout
    stopped = dataflow(c, "stop", cluster)
    assert stopped.returncode == 0 and "ends after the step under way" in stopped.stdout, (
        stopped.stderr
    )
    assert cluster.ended().clean
    assert "leads this run" not in dataflow(c, "verify", cluster).stdout
