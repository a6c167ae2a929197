"""The demo, started as a user starts it, on three hosts that have a bridge and a folder in
common.
"""

import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rigs.hosts import Command, Host, NoHosts, opened

from dataflow.folder.run_folder import RunFolder

STEPS = 80
PLACE = "generator=b+c,trainer=a"


@pytest.fixture(scope="module")
def three(give_hosts: Callable[..., list[Host]], shared: Path) -> list[Host]:
    return give_hosts("a", "b", "c", shared=[shared])


def demo(folder: Path, runs: str, *more: str) -> list[str]:
    own = [
        "--policy",
        str(folder / "policy"),
        "--runs",
        str(folder / runs),
        "--eval-every",
        str(STEPS),
    ]
    return [sys.executable, "-m", "graphs.sorting", "--steps", str(STEPS), *own, *more]


def start(hosts: list[Host], folder: Path, command: list[str]) -> list[Command]:
    """On each host the same command, as torchrun does."""
    common = {
        "WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": "29500",
        "DATAFLOW_SECRET": secrets.token_hex(32),
    }
    started = []
    for rank, host in enumerate(hosts):
        with (folder / f"{host.name}.out").open("a") as out:
            started.append(
                host.popen(command, {**common, "RANK": str(rank)}, stdout=out, stderr=out)
            )
    return started


def accuracies(run: Path) -> list[float]:
    lines = RunFolder.open(run).read_metrics()
    return [line["eval_accuracy"] for line in lines if "eval_accuracy" in line]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_learns_on_three_hosts_as_on_one(three: list[Host], shared: Path) -> None:
    alone = three[0].run(demo(shared, "alone"), timeout_s=400)
    assert alone.returncode == 0, alone.stderr
    over = demo(shared, "runs", "--on", "torchrun", "--place", PLACE, "--replicas", "generator=2")
    try:
        with opened(three, shared) as watch:
            status = [each.wait(400) for each in start(three, shared, over)]
    except NoHosts as error:
        pytest.skip(str(error))
    assert status == [0, 0, 0], (shared / "a.out").read_text()
    verdict = three[1].run([sys.executable, "-m", "dataflow", "verify", shared / "runs/latest"])
    assert verdict.returncode == 0, verdict.stdout
    (first, last), (_, last_alone) = (
        accuracies(shared / "runs/latest"),
        accuracies(shared / "alone/latest"),
    )
    assert last_alone > first + 0.3 and last == pytest.approx(last_alone, abs=0.15)
    several = {Path(path).name for path, hosts in watch.writers().items() if len(hosts) > 1}
    assert not several
    ledgers = {
        host for path, hosts in watch.writers().items() if "ledger.db" in path for host in hosts
    }
    assert ledgers == {"a"}
