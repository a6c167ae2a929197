"""Runs whose generators are beside each other, apart from the trainer: one takes each version in
for all of them.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rigs.hosts import Host
from rigs.hosts.cluster import Cluster
from rigs.machine import wait_until

from dataflow.folder.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PLACE = {"trainer": "a", "generator": "b", "prompts": "a", "reward": "a", "advantage": "a"}
THREE = {"generator-0", "generator-1", "generator-2"}


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster], policy: Path) -> Cluster:
    return make_cluster("a", "b", visible=[policy])


def lines(cluster: Cluster) -> list[dict[str, Any]]:
    return [line for line in RunFolder.open(cluster.run_folder).read_metrics() if "loss" in line]


def mirrors(line: dict[str, Any]) -> dict[str, dict[str, int]]:
    """By reader to which the trainer sends, those that it hands versions on to, with the version
    that each has.
    """
    return {
        reader: {name: taken["version"] for name, taken in sent.get("handed_on", {}).items()}
        for reader, sent in line["weights_sent"].items()
    }


def serves_all(cluster: Cluster, but: str = "") -> str:
    """The reader that takes versions for all three, each of which has one of the last, once there
    is one but `but`, some steps from now.
    """
    began, found = lines(cluster)[-1]["step"], list[str]()

    def is_one() -> bool:
        cluster.check_alive()
        line = lines(cluster)[-1]
        of = mirrors(line)
        found[:] = [
            name
            for name, behind in of.items()
            if name != but
            and {name, *behind} == THREE
            and all(line["step"] - at < 10 for at in behind.values())
            and line["step"] - line["weights_sent"][name]["version"] < 10
        ]
        return bool(found) and line["step"] > began + 10

    wait_until(is_one, 60.0, "a mirror of all three")
    return found[0]


def assert_timed(line: dict[str, Any]) -> None:
    """Of each reader, those behind another too, it is told how long its last exchange took."""
    (mirror,) = line["weights_sent"].values()
    for taken in (mirror, *mirror["handed_on"].values()):
        assert 0 < taken["taken_seconds"] <= taken["committed_seconds"] < 60
    longest = max(taken["committed_seconds"] for taken in (mirror, *mirror["handed_on"].values()))
    assert line["weights_trainer_seconds"] == longest


def pid_of(cluster: Cluster, worker: str) -> int:
    """As its host counts."""
    said = (cluster.run_folder / "logs" / f"{worker}.log").read_text()
    return int(re.findall(r"event='started'.*? pid=(\d+)", said)[-1])


def signal(host: Host, name: str, pid: int) -> None:
    host.run(["kill", f"-{name}", str(pid)])


def test_a_mirror_that_is_killed_or_stopped_is_followed_by_a_neighbour_and_the_run_goes_on(
    cluster: Cluster, policy: Path
) -> None:
    b = cluster.hosts[1]
    cluster.start(
        "tiny",
        {"policy": str(policy)},
        steps=500,
        place=PLACE,
        replicas={"generator": 3},
        limits={"stopped_s": 12.0},
    )
    cluster.wait_for_step(3)
    assert serves_all(cluster) == "generator-0", "the plan's first"
    assert_timed(lines(cluster)[-1])
    size = {sent["nbytes"] for sent in lines(cluster)[-1]["weights_sent"].values()}.pop()
    assert all(line["weights_sent_bytes"] % size == 0 for line in lines(cluster))

    signal(b, "KILL", pid_of(cluster, "generator-0"))
    wait_until(
        lambda: [fault["worker"] for fault in cluster.faults()] == ["generator-0"], 30.0, "its end"
    )
    second = serves_all(cluster)

    signal(b, "STOP", pid_of(cluster, second))
    third = serves_all(cluster, but=second)
    wait_until(
        lambda: set(mirrors(lines(cluster)[-1])) == {third},
        30.0,
        "the end of the one that was stopped",
    )
    verdict = cluster.ended(400.0)
    assert verdict.clean, verdict.line
    plan = RunFolder.open(cluster.run_folder).read_json("config.json")["plan"]
    assert any(
        "of 3 readers (generator) 'generator-0' takes each version over the network" in line
        for line in plan
    )


def test_ranks_that_share_a_model_take_their_slices_of_what_one_of_their_host_took_in(
    cluster: Cluster, policy: Path
) -> None:
    knobs = {"policy": str(policy), "generator_knobs": {"tensor_parallel": 2}, "max_staleness": 0}
    cluster.start(
        "tiny", knobs, steps=4, place=PLACE, replicas={"generator": 2}, agents=cluster.hosts[:1]
    )
    cluster.join(cluster.hosts[1], {"DATAFLOW_AGENT_CPUS": "4"})
    verdict = cluster.ended()
    assert verdict.clean, verdict.line
    (sent,) = lines(cluster)[-1]["weights_sent"].items()
    assert sent[0] == "generator-0" and list(sent[1]["handed_on"]) == ["generator-1"]
    assert sent[1]["pair_bytes"] == [[sent[1]["nbytes"]]], "the whole model, once"
