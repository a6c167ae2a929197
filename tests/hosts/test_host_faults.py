"""Hosts that die, and links that are cut: what falls is noticed, started elsewhere, and nothing is
trained twice.
"""

import contextlib
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rigs.hosts import Host
from rigs.hosts.cluster import Cluster
from rigs.machine import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PLACE = {"generator": ("b", "c"), "trainer": "a"}
HANG_S = 6.0
LIMITS = {"hang_s": HANG_S, "host_s": 60.0, "adopt_s": 90.0}


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster], policy: Path) -> Cluster:
    return make_cluster("a", "b", "c", visible=[policy])


def start(
    cluster: Cluster, policy: Path, steps: int, place: object = PLACE, hang_s: float = HANG_S
) -> None:
    cluster.start(
        "tiny",
        {"policy": str(policy)},
        steps=steps,
        place=place,
        replicas={"generator": 2},
        limits={**LIMITS, "hang_s": hang_s},
    )
    cluster.wait_for_step(3)


def lost(cluster: Cluster, host: Host) -> list[dict[str, Any]]:
    """Faults of workers that were on it."""
    return [fault for fault in cluster.faults() if f"host '{host.name}'" in str(fault["cause"])]


def clean(cluster: Cluster) -> None:
    verdict = cluster.ended()
    assert verdict.clean, verdict.line


@pytest.mark.parametrize("silently", [False, True], ids=["its processes first", "its link first"])
def test_a_host_that_dies_is_noticed_and_its_workers_go_on_elsewhere(
    cluster: Cluster, policy: Path, silently: bool
) -> None:
    b = cluster.hosts[1]
    start(cluster, policy, steps=60)
    at = time.time()
    if silently:
        b.cut()
    b.kill()
    cluster.agents.pop("b")
    clean(cluster)
    assert {fault["worker"] for fault in lost(cluster, b)} == {
        "prompts-0",
        "reward-0",
        "generator-0",
    }
    for fault in lost(cluster, b):
        assert fault["at"] - at < (HANG_S + 2.0 if silently else 5.0)
        assert fault["recovered_s"] < 20.0
    b.boot()


@pytest.mark.parametrize(("cuts_s", "hang_s"), [((3.0, 7.0, 14.0), 15.0), ((30.0,), 33.0)])
def test_cuts_shorter_than_the_limit_change_nothing(
    cluster: Cluster, policy: Path, cuts_s: tuple[float, ...], hang_s: float
) -> None:
    """Though each of them is longer than TCP's own tries, which it makes at twice the distance each
    time.
    """
    b = cluster.hosts[1]
    start(cluster, policy, steps=400, hang_s=hang_s)
    for cut_s in cuts_s:
        b.cut()
        time.sleep(cut_s)
        b.mend()
        mended, made = time.monotonic(), cluster.steps()
        cluster.wait_for_step(made + 3, 30.0)
        print(f"cut for {cut_s:g} s: three steps {time.monotonic() - mended:.1f} s after")
    clean(cluster)
    assert cluster.faults() == []


def test_a_host_that_is_cut_off_comes_back_and_does_nothing_twice(
    cluster: Cluster, policy: Path
) -> None:
    b = cluster.hosts[1]
    start(cluster, policy, steps=400)
    b.cut()
    wait_until(
        lambda: "host 'b' was not heard" in cluster.said(), HANG_S + 5.0, "the loss of the host"
    )
    b.mend()
    wait_until(lambda: "host 'b' is back" in cluster.said(), 30.0, "the host")
    clean(cluster)
    assert {fault["worker"] for fault in lost(cluster, b)} == {
        "prompts-0",
        "reward-0",
        "generator-0",
    }


def test_a_trainer_that_is_cut_off_alone_commits_nothing_more(
    cluster: Cluster, policy: Path
) -> None:
    c = cluster.hosts[2]
    start(cluster, policy, steps=60, place={"generator": ("a", "b"), "trainer": "c"})
    there = set(c.processes())
    c.cut()
    wait_until(
        lambda: "host 'c' was not heard" in cluster.said(), HANG_S + 5.0, "the loss of the host"
    )
    cluster.wait_for_step(cluster.steps() + 3)
    assert there <= set(c.processes())  # it goes on by itself
    c.mend()
    clean(cluster)
    assert [fault["worker"] for fault in lost(cluster, c)] == ["trainer-0"]


def test_a_scheduler_whose_host_dies_is_followed_by_one_on_another_host(
    cluster: Cluster, policy: Path
) -> None:
    a, b, c = cluster.hosts
    place = {
        "generator": ("b", "c"),
        "trainer": "c",
        "prompts": "b",
        "reward": "b",
        "advantage": "b",
    }
    start(cluster, policy, steps=400, place=place)
    workers = {host.name: set(host.processes()) for host in (b, c)}
    a.cut()
    a.kill()
    cluster.agents.pop("a")
    before = cluster.steps()
    cluster.launch(
        "tiny",
        {"policy": str(policy)},
        on=b,
        place=place,
        replicas={"generator": 2},
        resume=str(cluster.run_folder),
        limits=LIMITS,
    )
    cluster.wait_for_step(before + 20)
    for host in (b, c):
        assert workers[host.name] <= set(host.processes())  # they were taken over as they are
    clean(cluster)
    assert [fault["worker"] for fault in cluster.faults()] == ["scheduler"]
    # hours: the clocks of hosts are days apart
    assert not re.search(r"\d+:\d\d:\d\d elapsed", cluster.said())
    a.boot()


def test_a_host_joins_a_run_of_which_another_has_just_died(cluster: Cluster, policy: Path) -> None:
    _, b, c = cluster.hosts
    start(cluster, policy, steps=100_000)
    cluster.agents.pop("c").kill()
    wait_until(lambda: "host 'c' has" in cluster.said(), 30.0, "the loss of the agent")
    b.cut()
    b.kill()
    cluster.agents.pop("b")
    try:
        joins = cluster.join(c)
        wait_until(
            lambda: "host 'c' is back" in cluster.said() or joins.poll() is not None,
            90.0,
            "the host that joins",
        )
        assert joins.poll() is None, cluster.said_by_agent(c)
        wait_until(
            lambda: "host 'b' was not heard" in cluster.said(),
            HANG_S + 10.0,
            "the loss of the host",
        )
        cluster.wait_for_step(cluster.steps() + 3)
        stop(cluster)
    finally:
        print(cluster.said()[-3000:], cluster.said_by_agent(c)[-2000:])
        b.boot()


def test_when_the_schedulers_own_link_was_cut_all_go_back_to_where_the_user_wants_them(
    cluster: Cluster, policy: Path
) -> None:
    a, b, c = cluster.hosts
    start(
        cluster,
        policy,
        steps=100_000,
        place={"generator": ("b", "c"), "trainer": "c", "prompts": "b"},
    )
    a.cut()
    for name in "bc":
        wait_until(
            lambda name=name: f"host '{name}' was not heard" in cluster.said(),
            20.0,
            "the loss of all others",
        )
    a.mend()
    for name in "bc":
        wait_until(lambda name=name: f"host '{name}' is back" in cluster.said(), 30.0, "the others")
    wait_until(
        lambda: (
            {"prompts-0", "generator-0"} <= workers(b)
            and {"trainer-0", "generator-1"} <= workers(c)
        ),
        90.0,
    )
    assert not {"trainer-0", "generator-0", "generator-1"} & workers(a)
    cluster.wait_for_step(cluster.steps() + 3)
    stop(cluster)


def workers(host: Host) -> set[str]:
    """Of a run that are there, by the logs that they write."""
    found = set()
    for pid in host.processes():
        with contextlib.suppress(OSError):
            found.add(Path(f"/proc/{pid}/fd/2").readlink().stem)
    return found


def stop(cluster: Cluster) -> None:
    """The run ends as its user wants, and has done nothing twice."""
    cluster.hosts[0].run([sys.executable, "-m", "dataflow", "stop", str(cluster.run_folder)])
    clean(cluster)
