"""A host that does not fit: one clear sentence says why, and nobody waits for what will not
come.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rigs.hosts import Host
from rigs.hosts.cluster import Cluster
from rigs.machine import wait_until

from dataflow.system.security import RunKeys

pytestmark = pytest.mark.slow


OTHER_VERSIONS = """
import importlib.metadata, platform
known = importlib.metadata.version
importlib.metadata.version = lambda name: "2.0.1" if name == "torch" else known(name)
platform.python_version_tuple = lambda: ("3", "9", "1")
"""


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster("a", "b", disk_bytes=256 << 20, memory_bytes=64 << 20)


def ended(cluster: Cluster, deadline_s: float = 60.0) -> str:
    """What the scheduler said in the end: it failed."""
    assert cluster.scheduler
    assert cluster.scheduler.wait(deadline_s) == 1, cluster.said()
    return last_line(cluster.said())


def refused(cluster: Cluster, host: Host, deadline_s: float = 60.0) -> str:
    """What the agent of a host said in the end."""
    assert cluster.agents[host.name].wait(deadline_s) in (1, 2), cluster.said_by_agent(host)
    return last_line(cluster.said_by_agent(host))


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_a_host_with_other_versions_is_refused(cluster: Cluster) -> None:
    a, b = cluster.hosts
    patch = cluster.folder / "other/sitecustomize.py"
    patch.parent.mkdir()
    patch.write_text(OTHER_VERSIONS)
    cluster.start("fakes", agents=[a])
    cluster.join(b, {"PYTHONPATH": str(patch.parent)})
    python = ".".join(map(str, sys.version_info[:2]))
    for said in (ended(cluster), refused(cluster, b)):
        assert (
            f"host 'b' has Python 3.9 and the scheduler {python}; torch 2.0.1 and the scheduler 2."
            in said
        )


def test_a_host_with_another_version_of_the_program_is_refused(cluster: Cluster) -> None:
    a, b = cluster.hosts
    text = cluster.program.read_text().replace(
        "Path(__file__).parents[2]", f"Path({str(cluster.program.parents[2])!r})"
    )
    for host, version in (
        (a, text),
        (b, text.replace("pause_s: float = 0.0", "pause_s: float = 0.001")),
    ):
        host.outside("/tmp/program.py").write_text(version)
    cluster.program = Path("/tmp/program.py")
    cluster.start("fakes")
    for said in (ended(cluster), refused(cluster, b)):
        assert (
            "host 'b' has another version of the program" in said and "'/tmp/program.py' is" in said
        )


def join_with_other_keys(cluster: Cluster, own_folder: dict[str, str]) -> None:
    a, b = cluster.hosts
    keys = cluster.folder / "other.keys"
    keys.touch(0o600)
    keys.write_bytes(RunKeys.make().to_bytes())
    cluster.start("fakes", agents=[a])
    cluster.join(b, {"DATAFLOW_AGENT_KEYS": str(keys), **own_folder})


def test_an_agent_with_other_keys_is_not_let_in(cluster: Cluster) -> None:
    join_with_other_keys(cluster, {})
    for said in (ended(cluster), refused(cluster, cluster.hosts[1])):
        assert "host 'b' has other keys than the run in '" in said


def test_an_agent_with_other_keys_that_does_not_see_the_runs_folder_is_not_let_in(
    cluster: Cluster,
) -> None:
    join_with_other_keys(cluster, {"DATAFLOW_AGENT_FOLDER": "/home/b/runs"})
    said = refused(cluster, cluster.hosts[1])
    assert "who is there has other keys than this run's" in said and "host 'b' ends" in said


def test_an_address_that_is_no_address_of_the_host_is_refused(cluster: Cluster) -> None:
    a, b = cluster.hosts
    cluster.start("fakes", agents=[a])
    cluster.join(b, {"DATAFLOW_AGENT_ADDRESS": "10.77.0.99"})
    for said in (ended(cluster), refused(cluster, b)):
        assert "the run is to listen at '10.77.0.99', but" in said


def hidden(host: Host, address: str) -> str:
    """An address of a host that no other reaches."""
    subprocess.run(
        [*host._enter_network, "ip", "address", "add", f"{address}/32", "dev", "lo"], check=False
    )
    return address


def test_an_address_of_a_host_that_no_other_reaches_is_named_before_the_run_begins(
    cluster: Cluster,
) -> None:
    a, b = cluster.hosts
    cluster.start("fakes", agents=[a])
    cluster.join(b, {"DATAFLOW_AGENT_ADDRESS": hidden(b, "10.99.0.2")})
    said = ended(cluster)
    assert (
        "host 'a' does not reach host 'b' at 10.99.0.2 (" in said
        and "DATAFLOW_AGENT_ADDRESS" in said
    )


def test_a_scheduler_at_an_address_that_no_host_reaches_hears_of_it(cluster: Cluster) -> None:
    a, b = cluster.hosts
    cluster.launch("fakes", listen=hidden(a, "10.99.0.1"))
    wait_until(cluster.joining, 60.0, "what agents have to know")
    cluster.join(b)
    for said in (ended(cluster), refused(cluster, b)):
        assert (
            "the scheduler at tcp://10.99.0.1:" in said
            and "nobody answers there; host 'b' ends" in said
        )


def test_an_agent_that_is_given_an_address_at_which_nobody_is_finds_the_scheduler_by_the_folder(
    cluster: Cluster,
) -> None:
    a, b = cluster.hosts
    cluster.start("fakes", agents=[a], steps=5)
    late = {**(cluster.joining() or {}), "DATAFLOW_AGENT_HOST": "b"}
    cluster.join(b, {"DATAFLOW_AGENT_SCHEDULER": "tcp://10.77.0.99:5555"})
    assert cluster.ended().clean
    assert cluster.spawn(b, [sys.executable, "-m", "dataflow.agent"], "late", late).wait(60) == 2
    assert "host 'b' comes too late: the run in '" in last_line(cluster.said("late"))


def test_a_port_that_is_taken_is_named(cluster: Cluster) -> None:
    a = cluster.hosts[0]
    taken = (
        "import socket, time; s = socket.create_server(('0.0.0.0', 4567)); print('up', flush=True);"
        " time.sleep(999)"
    )
    holder = a.popen([sys.executable, "-c", taken], stdout=-1)
    assert holder.stdout and holder.stdout.readline() == "up\n"
    cluster.launch("fakes", listen=f"{a.address}:4567")
    assert f"cannot listen at tcp://{a.address}:4567" in ended(cluster)
    holder.kill()


def test_a_host_whose_folder_is_that_of_another_run_says_so(cluster: Cluster) -> None:
    a, b = cluster.hosts
    cluster.start("fakes", agents=[a], checkpoint_to=str(cluster.folder / "copies"))
    b.run(["mkdir", "-p", "/home/b/runs/rollouts/step-000001.arrow"])
    cluster.join(b, {"DATAFLOW_AGENT_FOLDER": "/home/b/runs"})
    assert (
        "host 'b' has files of another run at '/home/b/runs', as 'step-000001.arrow'; move that"
        in ended(cluster)
    )


def test_a_host_with_the_folder_of_a_run_that_another_leads_says_so(cluster: Cluster) -> None:
    a, b = cluster.hosts
    cluster.start("fakes", agents=[a], limits={"start_s": 8.0})
    b.run(["sh", "-c", "mkdir -p /home/b/led && touch /home/b/led/ledger.db"])
    cluster.join(b, {"DATAFLOW_AGENT_FOLDER": "/home/b/led"})
    assert "host 'b' comes too late: the run in '/home/b/led' has ended" in refused(cluster, b)


def test_a_host_whose_disk_is_full_says_so(cluster: Cluster) -> None:
    b = cluster.hosts[1]
    for place in ("/tmp/full", "/dev/shm/full"):
        b.run(["dd", "if=/dev/zero", f"of={place}", "bs=1M"])
    cluster.start("fakes", limits={"start_s": 30.0})
    assert "host 'b': " in (said := ended(cluster)) and "No space left" in said
    b.run(["rm", "/tmp/full", "/dev/shm/full"])
