"""A trainer, or a reference, whose ranks are on several hosts: it computes what it computes on one,
and outlives one of them.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rigs.graphs import losses
from rigs.hosts.cluster import Cluster
from rigs.machine import wait_until

from dataflow.folder.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HANG_S = 6.0
LIMITS = {"hang_s": HANG_S, "host_s": 60.0, "adopt_s": 90.0}


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster], policy: Path) -> Cluster:
    return make_cluster("a", "b", "c", visible=[policy])


def start(
    cluster: Cluster,
    policy: Path,
    place: object,
    cores: int,
    steps: int,
    *,
    ranks: int = 2,
    **knobs: int,
) -> None:
    """ranks: of the trainer."""
    cluster.launch(
        "tiny",
        {"policy": str(policy), "max_staleness": 4} | knobs,
        steps=steps,
        place=place,
        ranks={"trainer": ranks},
        limits=LIMITS,
        on=cluster.hosts[2],
        listen=cluster.hosts[2].address,
    )
    wait_until(cluster.joining, 120.0, "what agents have to know")
    for host in cluster.hosts:
        cluster.join(host, {"DATAFLOW_AGENT_CPUS": str(cores)})


def clean(cluster: Cluster) -> None:
    verdict = cluster.ended()
    assert verdict.clean, verdict.line


def where(cluster: Cluster) -> Any:
    return RunFolder.open(cluster.run_folder).read_json("config.json")["hosts"]["trainer"]


def test_ranks_on_two_hosts_make_the_steps_that_they_make_on_one(
    cluster: Cluster, policy: Path
) -> None:
    """At staleness 0 every rollout is drawn from the weights of the step before: what differs once
    differs for good.
    """
    start(cluster, policy, {"trainer": ("a", "b"), "generator": "c"}, 2, 4, max_staleness=0)
    clean(cluster)
    spread = losses(cluster.run_folder)
    assert where(cluster) == ["a", "b"]
    (cluster.folder / "runs").rename(cluster.folder / "spread")
    start(cluster, policy, {"trainer": "a", "generator": "c"}, 2, 4, max_staleness=0)
    clean(cluster)
    assert where(cluster) == ["a"]
    assert spread == pytest.approx(losses(cluster.run_folder), abs=1e-5) and len(spread) == 4


@pytest.mark.parametrize(
    ("falls", "silently"),
    [("b", False), ("b", True), ("a", True)],
    ids=["a rank's, its processes first", "a rank's, its link first", "the first rank's"],
)
def test_a_host_of_its_ranks_dies_and_the_trainer_goes_on_where_there_is_room(
    cluster: Cluster, policy: Path, falls: str, silently: bool
) -> None:
    """No host has two cores, so that nobody has to say that the ranks are to be spread."""
    start(cluster, policy, {"generator": "c"}, 1, 60)
    cluster.wait_for_step(3)
    assert where(cluster) == ["a", "b"]
    host, at = next(host for host in cluster.hosts if host.name == falls), time.time()
    if silently:
        host.cut()
    host.kill()
    cluster.agents.pop(falls)
    clean(cluster)
    of_trainer = [fault for fault in cluster.faults() if fault["worker"] == "trainer-0"]
    assert of_trainer and all(fault["recovered_s"] < 60.0 for fault in of_trainer[-1:])
    assert any(f"host '{falls}'" in str(fault["cause"]) for fault in of_trainer)
    assert of_trainer[0]["at"] - at < HANG_S + 5.0
    logs = {path.name for path in (cluster.run_folder / "logs").iterdir()}
    assert {"trainer-0@b.log", "trainer-0@c.log"} <= logs
    host.boot()


def test_a_rank_on_another_host_that_is_killed_ends_its_worker_which_is_started_again(
    cluster: Cluster, policy: Path
) -> None:
    start(cluster, policy, {"generator": "c"}, 1, 60)
    cluster.wait_for_step(3)
    b = cluster.hosts[1]
    os.kill(max(b.processes()), signal.SIGKILL)  # the rank was started last
    clean(cluster)
    fault, *more = [fault for fault in cluster.faults() if fault["worker"] == "trainer-0"]
    assert (
        "rank 1 of 'trainer'" in str(fault["cause"])
        and "on host 'b'" in str(fault["cause"])
        and not more
    )


def with_reference(cluster: Cluster, policy: Path, place: object, steps: int) -> None:
    """A reference of two ranks, on hosts that have nothing else to do."""
    where = {"trainer": "c", "generator": "c", "ref_logprobs": place}
    start(cluster, policy, where, 2, steps, ranks=1, max_staleness=0, reference_ranks=2)


def of_reference(cluster: Cluster) -> Any:
    return RunFolder.open(cluster.run_folder).read_json("config.json")["hosts"]["ref_logprobs"]


def test_a_reference_on_two_hosts_makes_the_steps_that_it_makes_on_one(
    cluster: Cluster, policy: Path
) -> None:
    with_reference(cluster, policy, ("a", "b"), 4)
    clean(cluster)
    spread = losses(cluster.run_folder)
    assert of_reference(cluster) == ["a", "b"]
    (cluster.folder / "runs").rename(cluster.folder / "spread")
    with_reference(cluster, policy, "a", 4)
    clean(cluster)
    assert of_reference(cluster) == ["a"]
    assert spread == pytest.approx(losses(cluster.run_folder), abs=1e-5) and len(spread) == 4


@pytest.mark.parametrize("falls", ["a", "b"])
def test_a_host_of_a_references_ranks_dies_and_it_is_started_again(
    cluster: Cluster, policy: Path, falls: str
) -> None:
    with_reference(cluster, policy, ("a", "b"), 60)
    cluster.wait_for_step(3)
    host = next(host for host in cluster.hosts if host.name == falls)
    host.kill()
    cluster.agents.pop(falls)
    host.boot()
    cluster.join(host, {"DATAFLOW_AGENT_CPUS": "2"})
    clean(cluster)
    faults = [fault for fault in cluster.faults() if fault["worker"] == "ref_logprobs-0"]
    assert any(f"host '{falls}'" in str(fault["cause"]) for fault in faults)
    assert len(losses(cluster.run_folder)) == 60
