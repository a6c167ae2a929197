"""Runs over hosts that see no folder in common: each keeps what it makes, and another goes on from
the copies at an address.
"""

import json
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rigs.hosts import Host
from rigs.hosts.cluster import Cluster
from rigs.machine import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


STEPS = 80


PLACE = {"generator": ("a", "b"), "trainer": "c"}


ASK = """
import json, sys
from dataflow.folder.ledger import Ledger
ledger = Ledger.open(sys.argv[1], readonly=True)
"""


TRAINED = "print(json.dumps({step.step: list(step.trained) for step in ledger.steps('trainer')}))"


PLACES = "print(json.dumps(ledger.places('rollouts/')))"


LIMITS = {"hang_s": 12.0, "host_s": 20.0, "adopt_s": 20.0}


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that the hosts have in common."""
    return tmp_path_factory.mktemp("copies")


@pytest.fixture(scope="module")
def three(give_hosts: Callable[..., list[Host]], policy: Path, copies: Path) -> list[Host]:
    return give_hosts("a", "b", "c", visible=[policy], shared=[copies])


@pytest.fixture
def cluster(three: list[Host], tmp_path: Path) -> Iterator[Cluster]:
    run = Cluster(three, Path("/tmp", tmp_path.name), apart=tmp_path)
    yield run
    run.kill()
    for host in three:
        if host._process is None:
            host.boot()


def verified(cluster: Cluster) -> str:
    """What `dataflow verify` prints on the scheduler's host."""
    assert cluster.leads
    run = cluster.folder / "runs" / cluster.run_folder.name
    done = cluster.leads.run([sys.executable, "-m", "dataflow", "verify", run])
    assert done.returncode == 0, done.stdout
    return done.stdout


def ended(cluster: Cluster) -> str:
    """What the scheduler said of a run that came to its end, and `verify` of its folder."""
    assert cluster.scheduler
    assert cluster.scheduler.wait(400) == 0, cluster.said()
    return verified(cluster)


def failed(cluster: Cluster, deadline_s: float = 300.0) -> str:
    """What the scheduler said of a run that could not go on."""
    assert cluster.scheduler
    assert cluster.scheduler.wait(deadline_s) == 1, cluster.said()
    return cluster.said().strip().splitlines()[-1]


def start(
    cluster: Cluster, policy: Path, copies: Path | None, steps: int, place: Any = PLACE, **more: Any
) -> None:
    """copies: a folder that all hosts see, as they would see an object store; the run folder is not
    in it.
    """
    cluster.start(
        "tiny",
        {"policy": str(policy), "checkpoint_every": 5},
        steps=steps,
        place=place,
        replicas={"generator": 2},
        limits=LIMITS,
        **({"checkpoint_to": str(copies)} if copies else {}),
        **more,
    )


def again(cluster: Cluster, policy: Path, copies: Path, steps: int, place: Any = PLACE) -> None:
    """Once all its processes have ended."""
    cluster.kill()
    cluster.agents.clear()
    run = str(cluster.folder / "runs" / cluster.run_folder.name)
    cluster._here(cluster.folder / "joining.json").unlink(missing_ok=True)
    start(cluster, policy, copies, steps, place, resume=run)


def copied(cluster: Cluster, copies: Path) -> int:
    """The newest step of which a whole copy is there."""
    markers = copies.glob(f"{cluster.run_folder.name}/part-*/checkpoints/step-*/commit.json")
    steps = (int(path.parent.name.removeprefix("step-")) for path in markers)
    return max(steps, default=0)


def trained(cluster: Cluster) -> dict[int, list[int]]:
    """Groups by step."""
    return {int(step): groups for step, groups in json.loads(asked(cluster, TRAINED)).items()}


def asked(cluster: Cluster, code: str) -> str:
    """What a few lines print of the ledger, on the host that has it."""
    assert cluster.leads
    return cluster.leads.python(
        ASK + code, cluster.folder / "runs" / cluster.run_folder.name / "ledger.db"
    )


def checkpoints(host: Host, cluster: Cluster) -> list[int]:
    """Steps of those that a host has."""
    paths = host.outside(cluster.folder).glob(f"runs/{cluster.run_folder.name}/checkpoints/step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in paths)


def once(cluster: Cluster, steps: int) -> None:
    """Each step is made, and no group is trained twice."""
    steps_made = trained(cluster)
    groups = [group for groups in steps_made.values() for group in groups]
    assert sorted(steps_made) == list(range(1, steps + 1)) and len(groups) == len(set(groups))


def test_the_demo_learns_on_hosts_that_see_no_folder_in_common(
    three: list[Host], copies: Path, tmp_path: Path
) -> None:
    """Started as torchrun does, on each host the same command; each makes its policy by itself."""
    common = {
        "WORLD_SIZE": "3",
        "MASTER_ADDR": three[0].address,
        "MASTER_PORT": "29500",
        "DATAFLOW_SECRET": secrets.token_hex(32),
    }
    command = [
        sys.executable,
        "-m",
        "graphs.sorting",
        "--steps",
        str(STEPS),
        "--eval-every",
        str(STEPS),
        "--policy",
        "/tmp/policy",
        "--runs",
        "/tmp/demo",
        "--checkpoint-to",
        str(copies),
        "--on",
        "torchrun",
        "--replicas",
        "generator=2",
        "--place",
        "generator=a+b,trainer=c",
    ]
    started = []
    for rank, host in enumerate(three):
        with (tmp_path / f"{host.name}.out").open("w") as out:
            started.append(
                host.popen(command, {**common, "RANK": str(rank)}, stdout=out, stderr=out)
            )
    assert [process.wait(600) for process in started] == [0, 0, 0], (tmp_path / "a.out").read_text()
    output = (tmp_path / "a.out").read_text()
    assert "hosts b and c do not see the scheduler's run folder /tmp/demo/sorting-" in output
    assert f"'trainer' stays on host 'c', and what is copied to {copies}/sorting-" in output
    verdict = three[0].run([sys.executable, "-m", "dataflow", "verify", "/tmp/demo/latest"])
    assert verdict.returncode == 0 and verdict.stdout.startswith("clean: ")
    assert (
        f"the rollouts of {STEPS} steps of 'trainer' are on host c, and not here" in verdict.stdout
    )
    metrics = next(three[0].outside("/tmp/demo").glob("sorting-*")) / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    first, last = [line["eval_accuracy"] for line in lines if "eval_accuracy" in line]
    assert last > first + 0.3
    b, c = ({path.name for path in host.outside("/tmp/demo").rglob("*")} for host in three[1:])
    assert "ledger.db" not in b | c
    assert not any(name.endswith(".arrow") for name in b) and "step-000001.arrow" in c


def test_a_run_without_an_address_is_refused_before_anything_starts(
    cluster: Cluster, policy: Path
) -> None:
    start(cluster, policy, None, steps=4)
    assert failed(cluster).endswith(
        "hosts b and c do not see the scheduler's run folder, and there is no address from which"
        " another host could go on; give all hosts one folder (runs=), or an address for copies of"
        " checkpoints (--checkpoint-to)"
    )
    assert cluster.steps() == 0


def test_all_processes_end_and_the_run_goes_on_from_what_each_host_has(
    cluster: Cluster, policy: Path, copies: Path
) -> None:
    start(cluster, policy, copies, steps=400)
    cluster.wait_for_step(12)
    cluster.kill()
    before = trained(cluster)
    newest = max(checkpoints(cluster.hosts[2], cluster))
    assert checkpoints(cluster.hosts[0], cluster) == [] and newest >= 10
    steps = max(before) + 10
    again(cluster, policy, copies, steps)
    assert ended(cluster).startswith("clean: ")
    once(cluster, steps)
    now = trained(cluster)
    assert all(now[step] == groups for step, groups in before.items())
    assert max(checkpoints(cluster.hosts[2], cluster)) == steps
    rollouts = json.loads(asked(cluster, PLACES))
    assert rollouts == {f"rollouts/step-{step:06d}.arrow": "c" for step in range(1, steps + 1)}


def test_a_trainer_goes_on_elsewhere_from_the_copies(
    cluster: Cluster, policy: Path, copies: Path
) -> None:
    """To another host with a disk of its own, and from there to the scheduler's."""
    start(cluster, policy, copies, steps=400)
    cluster.wait_for_step(12)
    wait_until(lambda: copied(cluster, copies) >= 5, 60.0, "a copy")
    cluster.kill()
    for place in (
        {"generator": ("a", "c"), "trainer": "b"},
        {"generator": ("b", "c"), "trainer": "a"},
    ):
        before, newest = trained(cluster), copied(cluster, copies)
        steps = max(before) + 6
        again(cluster, policy, copies, steps, place)
        assert ended(cluster).startswith("clean: ")
        once(cluster, steps)
        now = trained(cluster)
        assert newest >= 5 and all(now[step] == before[step] for step in range(1, newest + 1))


def test_a_generators_host_that_dies_with_its_disk_costs_its_rollouts_alone(
    cluster: Cluster, policy: Path, copies: Path
) -> None:
    start(cluster, policy, copies, steps=60)
    cluster.wait_for_step(5)
    cluster.hosts[1].kill()
    cluster.agents.pop("b")
    assert ended(cluster).startswith("clean: ")
    once(cluster, 60)
    assert {fault["worker"] for fault in cluster.faults()} == {"generator-1"}


def test_a_trainer_that_is_cut_off_goes_on_where_its_disk_is(
    cluster: Cluster, policy: Path, copies: Path
) -> None:
    c = cluster.hosts[2]
    start(cluster, policy, copies, steps=60)
    cluster.wait_for_step(6)
    c.cut()
    wait_until(
        lambda: "'trainer-0' keeps on host 'c' what no other sees" in cluster.said(),
        30.0,
        "what is waited for",
    )
    c.mend()
    assert ended(cluster).startswith("clean: ")
    once(cluster, 60)
    assert [fault["worker"] for fault in cluster.faults()] == ["trainer-0"]


def test_a_run_goes_on_without_the_host_that_died_with_its_trainers_disk(
    cluster: Cluster, policy: Path, copies: Path
) -> None:
    start(cluster, policy, copies, steps=400)
    wait_until(lambda: copied(cluster, copies) >= 10, 200.0, "copies")
    cluster.hosts[2].kill()
    cluster.agents.pop("c")
    assert (
        "'trainer-0' keeps on host 'c' what no other sees, and nothing else can go on with that"
        in failed(cluster)
    )
    before, newest = trained(cluster), copied(cluster, copies)
    cluster.hosts = cluster.hosts[:2]
    steps = max(before) + 6
    again(cluster, policy, copies, steps, {"generator": ("a", "b"), "trainer": "b"})
    assert ended(cluster).startswith("clean: ")
    once(cluster, steps)
    now = trained(cluster)
    assert all(now[step] == before[step] for step in range(1, newest + 1))


def test_a_run_whose_copies_are_gone_with_its_trainers_host_does_not_go_on(
    cluster: Cluster, policy: Path, copies: Path
) -> None:
    start(cluster, policy, copies, steps=400)
    cluster.wait_for_step(12)
    cluster.kill()
    name = cluster.run_folder.name
    for marker in copies.glob(f"{name}/part-*/checkpoints/step-*/commit.json"):
        marker.unlink()
    cluster.hosts = cluster.hosts[:2]
    again(cluster, policy, copies, 400, {"generator": ("a", "b"), "trainer": "a"})
    error = failed(cluster)
    assert f"'{name}' cannot go on: the checkpoint of step" in error
    assert "is on host 'c', and no copy is to be had" in error
