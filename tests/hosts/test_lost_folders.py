"""Hosts that die with the run folder: a run goes on from the address to which its checkpoints were
copied.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rigs.hosts.cluster import Cluster
from rigs.machine import wait_until

from dataflow.folder.copies.store import Address, Store, parts
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMITS = {"hang_s": 6.0, "host_s": 60.0, "adopt_s": 60.0}
BRING = """
import sys
from dataflow.folder.copies.process import bring_back
print(bring_back(sys.argv[1], sys.argv[2]).path)
"""


def copied(there: Path) -> list[int]:
    """Steps that are whole at an address, in its newest part."""
    runs = list(there.glob("*"))
    if not runs:
        return []
    run = Address.of(str(runs[0]))
    newest = max(parts(run), default=0)
    return Store(run.below(f"part-{newest:06d}")).whole() if newest else []


def test_trainer_and_scheduler_die_with_the_run_folder_and_other_hosts_go_on_from_the_address(
    make_cluster: Callable[..., Cluster], policy: Path
) -> None:
    whole = make_cluster("a", "b", "c", visible=[policy])
    a, b, c = whole.hosts
    there = whole.folder / "there"
    knobs = {"policy": str(policy), "checkpoint_every": 5}
    first = Cluster([a, b], whole.folder)
    first.start(
        "tiny",
        knobs,
        steps=400,
        place={"generator": ("b",), "trainer": "a"},
        checkpoint_to=str(there),
        limits=LIMITS,
    )
    wait_until(lambda: max(copied(there), default=0) >= 10, 200.0, "copies")
    first.wait_for_step(first.steps() + 2)
    for host in (a, b):
        host.cut()
        host.kill()
    run = first.run_folder
    with Ledger.open(run / "ledger.db", readonly=True) as ledger:
        was = {step.step: list(step.trained) for step in ledger.steps("trainer")}
    first.agents.clear()
    shutil.rmtree(whole.folder / "runs")
    newest = max(copied(there))

    b.boot()
    second = Cluster([c, b], whole.folder / "second")
    second.folder.mkdir()
    found = Path(c.python(BRING, there, second.folder / "runs"))
    assert found.name == run.name and found == second.run_folder
    try:
        second.start(
            "tiny",
            knobs,
            steps=newest + 12,
            place={"generator": ("b",), "trainer": "c"},
            resume=str(found),
            limits=LIMITS,
        )
        verdict = second.ended()
    finally:
        second.kill()
        a.boot()
    assert verdict.clean, verdict.line
    with Ledger.open(found / "ledger.db", readonly=True) as ledger:
        now = {step.step: list(step.trained) for step in ledger.steps("trainer")}
        assert ledger.counts("trainer").missing == 0
    groups = [group for trained in now.values() for group in trained]
    assert sorted(now) == list(range(1, newest + 13)) and len(groups) == len(set(groups))
    assert all(now[step] == was[step] for step in range(1, newest + 1))
    lines = [line["step"] for line in RunFolder.open(found).read_metrics() if "loss" in line]
    assert sorted(lines) == list(range(1, newest + 13))
    assert max(copied(there)) == newest + 12
