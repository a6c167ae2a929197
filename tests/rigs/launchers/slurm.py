"""A Slurm cluster of several nodes on this machine, on loopback alone, for as long as a test
lasts.
"""

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = "DATAFLOW_SLURM_ROOT"
"""Names a folder into which Debian's packages slurmctld, slurmd, slurm-client,
slurm-wlm-basic-plugins, munge, and the libraries that they need, were unpacked (dpkg -x); unset:
they are installed."""
DAEMONS = ("munged", "slurmctld", "slurmd", "slurmstepd")
LAST_S = 20.0


@dataclass(frozen=True)
class Cluster:
    """What speaks to it."""

    environment: Mapping[str, str]
    """For commands of Slurm, and for what submits jobs."""

    def ask(self, *command: str) -> str:
        """What a command says."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def job(self, number: str) -> Mapping[str, str]:
        """What Slurm knows of a job."""
        told = self.ask("scontrol", "--oneliner", "show", "job", number)
        return dict(part.partition("=")[::2] for part in told.split())


@contextlib.contextmanager
def slurm(folder: Path, nodes: int) -> Iterator[Cluster]:
    """Nodes n1, n2, ...; the test is skipped where Slurm is not at hand."""
    root = Path(os.environ.get(ROOT, "/"))
    path = os.pathsep.join(str(root / place) for place in ("usr/sbin", "usr/bin", "sbin", "bin"))
    found = {
        name: shutil.which(name, path=path) or shutil.which(f"{name}-wlm", path=path)
        for name in DAEMONS
    }
    missing = [
        name
        for name in (*DAEMONS, "sbatch")
        if not found.get(name) and not shutil.which(name, path=path)
    ]
    if missing:
        pytest.skip(
            f"Slurm is not installed, nor unpacked where {ROOT} says: no {', '.join(missing)}"
        )
    plugins = next(each.parent for each in root.glob("usr/lib/**/auth_munge.so"))
    libraries = os.pathsep.join(map(str, (plugins, plugins.parent)))
    (folder / "munge").mkdir(parents=True, mode=0o755)
    key, conf, munge = folder / "munge" / "key", folder / "slurm.conf", folder / "munge" / "socket"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    conf.write_text(_configuration(folder, plugins, munge, nodes))
    environment = {
        "SLURM_CONF": str(conf),
        "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
        **({"LD_LIBRARY_PATH": libraries} if ROOT in os.environ else {}),
    }
    (folder / "state").mkdir()
    commands = [
        [
            found["munged"],
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={munge}",
            f"--pid-file={folder}/munge/pid",
            f"--log-file={folder}/munge/log",
            f"--seed-file={folder}/munge/seed",
        ],
        [found["slurmctld"], "-D", "-c", "-f", str(conf)],
        *(
            [found["slurmd"], "-D", "-N", f"n{n}", "-f", str(conf), "-d", found["slurmstepd"]]
            for n in _count(nodes)
        ),
    ]
    cluster = Cluster(environment)
    with contextlib.ExitStack() as open_:
        for number, command in enumerate(commands):
            log = open_.enter_context((folder / f"daemon-{number}.log").open("wb"))
            daemon = subprocess.Popen(
                [str(part) for part in command],
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
            )
            open_.callback(_end, daemon)
            if not number:
                _until(munge.exists, "munged to listen")
        _until(
            lambda: cluster.ask("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(nodes),
            "the nodes to be idle",
        )
        yield cluster


def _configuration(folder: Path, plugins: Path, munge: Path, nodes: int) -> str:
    here, ports = socket.gethostname().partition(".")[0], _free_ports(nodes + 1)
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={here}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        f"SlurmUser={getpass.getuser()}",
        f"SlurmdUser={getpass.getuser()}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={munge},cred_expire=5",
        "CredType=cred/munge",
        f"PluginDir={plugins}",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "ReturnToService=2",
        "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
        "KillWait=5",
        # a job that is put back begins again as soon as what it was allowed before has expired
        "SchedulerParameters=sched_interval=1",
        "PartitionName=main Nodes=ALL Default=YES State=UP",
    ]
    cores = os.cpu_count() or 1
    lines += [
        f"NodeName=n{n} NodeHostname={here} NodeAddr=127.0.0.1 Port={ports[n]} CPUs={cores}"
        " State=UNKNOWN"
        for n in _count(nodes)
    ]
    return "\n".join(lines) + "\n"


def _count(nodes: int) -> range:
    return range(1, nodes + 1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_:
        sockets = [open_.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _until(is_so: object, what: str) -> None:
    deadline = time.monotonic() + LAST_S
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"waited {LAST_S:.0f} s for {what}"
        time.sleep(0.1)


def _end(daemon: "subprocess.Popen[bytes]") -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
