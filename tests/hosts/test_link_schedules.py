"""Links that come back at any moment of a restart, and processes that are killed meanwhile: the run
goes on, and does nothing twice.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from rigs.hosts import Host
from rigs.hosts.cluster import Cluster
from rigs.machine import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HANG_S = 3.0
PLACE = {"generator": ("b", "c"), "trainer": "a"}
ROUNDS = 4
WITHIN_S = 3.0
"""Of the loss of a host: by then its workers are at work elsewhere."""


def strike(cluster: Cluster, chance: Random) -> str:
    """Cut a host off, and mend it at some moment after it was given up; perhaps kill a worker of
    another one.
    """
    victim, other = chance.sample(cluster.hosts[1:], 2)
    mends_s, kills_s = (chance.random() * WITHIN_S for _ in range(2))
    lost, back = f"host '{victim.name}' was not heard", f"host '{victim.name}' is back"
    before = {word: cluster.said().count(word) for word in (lost, back)}
    acts = [(mends_s, victim.mend), (kills_s, lambda: kill(other, chance))]
    is_killing = chance.random() < 0.5
    victim.cut()
    wait_until(lambda: cluster.said().count(lost) > before[lost], 30.0, "the loss of the host")
    began = time.monotonic()
    for at_s, act in sorted(acts[: 1 + is_killing], key=lambda each: each[0]):
        time.sleep(max(0.0, began + at_s - time.monotonic()))
        act()
    wait_until(lambda: cluster.said().count(back) > before[back], 60.0, "the host")
    cluster.wait_for_step(cluster.steps() + 3, 60.0)
    return (
        f"{victim.name} back {mends_s:.2f} s after its loss"
        + f", kill at {kills_s:.2f} s" * is_killing
    )


def kill(host: Host, chance: Random) -> None:
    """Some worker of a host."""
    logs = "/logs/"
    workers = [
        pid for pid in host.processes() if logs in output(pid) and "agent-" not in output(pid)
    ]
    if workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(workers), signal.SIGKILL)


def output(pid: int) -> str:
    """The file that a process writes to."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/fd/2").readlink())
    return ""


@pytest.mark.parametrize("seed", range(5))
def test_a_link_that_comes_back_at_any_moment_of_a_restart_stalls_no_run(
    make_cluster: Callable[..., Cluster], policy: Path, seed: int
) -> None:
    cluster, chance = make_cluster("a", "b", "c", visible=[policy]), Random(seed)
    cluster.start(
        "tiny",
        {"policy": str(policy)},
        steps=100_000,
        place=PLACE,
        replicas={"generator": 2},
        limits={"hang_s": HANG_S, "host_s": 60.0, "adopt_s": 90.0},
    )
    cluster.wait_for_step(3)
    for number in range(ROUNDS):
        print(f"seed {seed}, schedule {number}: {strike(cluster, chance)}", flush=True)
    first = cluster.hosts[0]
    first.run([sys.executable, "-m", "dataflow", "stop", str(cluster.run_folder)])
    verdict = cluster.ended()
    assert verdict.clean, verdict.line
