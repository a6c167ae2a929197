"""Whole runs over hosts that have no more in common than a bridge and a folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
from rigs.hosts import NoHosts, opened
from rigs.hosts.cluster import Cluster
from rigs.machine import wait_until

PLACE = {"generator": ("b", "c"), "trainer": "a"}


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster("a", "b", "c")


@pytest.mark.slow
def test_a_graph_runs_over_three_hosts_and_leaves_nothing(cluster: Cluster, shared: Path) -> None:
    before = [host.processes() for host in cluster.hosts]
    try:
        with opened(cluster.hosts, shared) as watch:
            cluster.start("fakes", place=PLACE, replicas={"generator": 2}, steps=6)
            verdict = cluster.ended()
    except NoHosts as error:
        pytest.skip(str(error))
    assert verdict.clean, verdict.line
    assert {path for path, hosts in watch.writers().items() if len(hosts) > 1} == set()
    assert {host for path, hosts in watch.writers().items() for host in hosts} == {"a", "b", "c"}
    assert {
        host for path, hosts in watch.writers().items() if "ledger.db" in path for host in hosts
    } == {"a"}
    wait_until(
        lambda: [host.processes() for host in cluster.hosts] == before,
        what="the end of all processes",
    )
