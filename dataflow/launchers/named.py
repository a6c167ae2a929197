"""Launchers by the name that `--on` gives them."""

import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.agent.host_program import HOSTED
from dataflow.errors import GraphError, RunError, nearest
from dataflow.launchers.launcher import Joining, Launcher
from dataflow.launchers.local import Local, local
from dataflow.launchers.ray_messages import RAY, AgentEnded, Connect, Connected, PlaceAgents, Wrong
from dataflow.launchers.torchrun import Torchrun, become_agent
from dataflow.limits import Limits
from dataflow.planning.hosts import Host
from dataflow.system.addresses import resolved
from dataflow.system.child import Child, program, started
from dataflow.system.files import tail
from dataflow.system.messages import Channel, MessageError

# The launcher on a Ray cluster: one placement group, and in each of its bundles an actor that
# keeps a host's agent.

_SEND_S, _END_S = 10.0, 10.0


def ray(
    address: str = "auto",
    *,
    hosts: int | None = None,
    cpus: int | None = None,
    gpus: int | None = None,
    resources: Mapping[str, float] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    wait_s: float = Limits.start_s / 2,
) -> "OnRay":
    """For `run(graph, on=ray(...))`: hosts of a Ray cluster, with one agent on each.

    Args:
        address: of the cluster; `auto`: the one of which this machine, or this job, is a part.
        hosts: how many; None: all that are there now.
        cpus, gpus: of each; None: as many as the smallest of them has.
        resources: what else each of them has to have, by Ray's names, as in {"rack-1": 1}.
        runtime_env: Ray's, for the processes on the hosts: packages, variables. The program itself
            is to be at one path everywhere: in a shared folder, or by `ray job submit
            --working-dir`.
        wait_s: for the cluster to answer, and then for the hosts to be free; as long as an
            autoscaler may take.

    Errors: GraphError.

    >>> from dataflow.launchers.named import ray
    >>> ray(hosts=3, gpus=8).address
    'auto'
    """
    if runtime_env and "working_dir" in runtime_env:
        raise GraphError(
            "a run's program is at one path on all hosts, but runtime_env has a working_dir, which"
            " Ray would put elsewhere on them; use a shared folder, or ray job submit"
            " --working-dir, which moves the driver too"
        )
    wrong = {"hosts": hosts, "cpus": cpus} | {"gpus": None if gpus is None else gpus + 1}
    if any(value is not None and value < 1 for value in wrong.values()):
        raise GraphError(
            f"a run has at least 1 host with 1 core and 0 accelerators, but got hosts={hosts},"
            f" cpus={cpus}, gpus={gpus}; give more, or leave them out"
        )
    return OnRay(
        address=address,
        wanted=hosts or 0,
        cpus=-1 if cpus is None else cpus,
        gpus=-1 if gpus is None else gpus,
        resources=dict(resources or {}),
        runtime_env=dict(runtime_env or {}),
        wait_s=wait_s,
    )


@dataclass(kw_only=True)
class OnRay:
    """As `ray` makes it. A Launcher; speaks to Ray through a process of its own, `ray_driver`."""

    address: str
    wanted: int
    """Hosts; 0: all."""
    cpus: int
    gpus: int
    """-1: as many as the smallest of the hosts has."""
    resources: Mapping[str, float]
    runtime_env: Mapping[str, Any]
    wait_s: float
    _driver: Child | None = None
    _channel: "Channel[Any] | None" = None
    _connected: Connected | None = None

    @property
    def hosts(self) -> int:
        """As `Launcher.hosts`. Errors: GraphError without Ray, RunError without a cluster that has
        them.
        """
        return self._connect()[1].hosts

    @property
    def listen(self) -> str:
        """As `Launcher.listen`. Errors: as `hosts`."""
        return self._connect()[1].listen

    def start(self, join: Joining) -> None:
        """As `Launcher.start`; that there is no place for them is told by `ended`."""
        channel, _ = self._connect()
        name = Path(join.folder).name
        channel.send(
            PlaceAgents(name=name, scheduler=join.address, folder=join.folder, keys=join.keys)
        )

    def ended(self) -> list[str]:
        if self._driver is None or self._channel is None:
            return []
        try:
            return [_text(message) for message in self._channel.arrived()]
        except (EOFError, OSError, MessageError):
            self._driver.end(_END_S)
            how, last = self._driver.state, _last_line(self._driver)
            self.stop()
            return [
                f"the process that speaks to Ray {how}, and all agents with it:"
                f" {last or 'it said nothing'}"
            ]

    def stop(self) -> None:
        """As `Launcher.stop`: its actors and its placement group."""
        if self._channel is not None:
            self._channel.close()
        if self._driver is not None:
            self._driver.end(_END_S)
        self._driver = self._channel = self._connected = None

    def _connect(self) -> tuple[Channel[Any], Connected]:
        """Have the driver find the cluster, once."""
        if self._channel is None or self._connected is None:
            if importlib.util.find_spec("ray") is None:
                raise GraphError(
                    "--on ray needs Ray, which is not installed; pip install 'dataflow-rl[ray]'"
                )
            self._channel, theirs = Channel.pair(RAY, _SEND_S)
            with theirs:
                self._driver = program(
                    "dataflow.launchers.ray_driver",
                    end=theirs,
                    words=True,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._connected = self._ask(self._channel)
        return self._channel, self._connected

    def _ask(self, channel: Channel[Any]) -> Connected:
        channel.send(
            Connect(
                address=self.address,
                hosts=self.wanted,
                cpus=self.cpus,
                gpus=self.gpus,
                resources=self.resources,
                runtime_env=self.runtime_env,
                wait_s=self.wait_s,
            )
        )
        try:
            message = channel.receive(self.wait_s)
        except (EOFError, TimeoutError) as error:
            last = ""
            if self._driver is not None:
                last = _last_line(self._driver)
                self._driver.kill()
            self.stop()
            raise RunError(
                f"the run waited for {self.wait_s:.0f} s at most for the Ray cluster at"
                f" '{self.address}', but it does not answer: {last or error}; see ray status, and"
                " that this machine reaches it"
            ) from error
        if isinstance(message, Connected):
            return message
        self.stop()
        raise RunError(_text(message))


def _last_line(process: Child) -> str:
    return process.last_words.rpartition("\n")[2]


def _text(message: AgentEnded | Wrong) -> str:
    return message.why if isinstance(message, AgentEnded) else message.error


# The launcher within a Slurm job: one agent on each of its hosts, all of them one step, started
# by srun.

_ASK_S = 30.0
_STOP_S = 5.0
_AGENT = (
    'DATAFLOW_AGENT_HOST="$SLURMD_NODENAME" DATAFLOW_AGENT_CPUS="$SLURM_CPUS_ON_NODE" '
    'DATAFLOW_AGENT_GPUS="${SLURM_GPUS_ON_NODE:-}" exec "$0" -m dataflow.agent'
)
"""What a task of the step runs, as Slurm tells each host its own."""


class Slurm:
    """The hosts of the job that this process is a part of; in a batch script, or in salloc on one
    of them.
    """

    def __init__(self) -> None:
        self._step: Child | None = None
        self._log: Path | None = None

    @functools.cached_property
    def _names(self) -> Sequence[str]:
        """Of its hosts. Errors: GraphError outside of a job, RunError where Slurm does not
        answer.
        """
        nodes = os.environ.get("SLURM_JOB_NODELIST")
        if not nodes:
            raise GraphError(
                "--on slurm is for a program within a Slurm job, but SLURM_JOB_NODELIST is not set;"
                " have dataflow launch --slurm submit it, or start it below salloc"
            )
        return _asked("scontrol", "show", "hostnames", nodes).split()

    @property
    def hosts(self) -> int:
        """All of the job."""
        return len(self._names)

    @functools.cached_property
    def listen(self) -> str:
        """The first host's, as Slurm itself reaches it; the batch script runs there."""
        first = _asked("scontrol", "--oneliner", "show", "node", self._names[0])
        facts = dict(part.partition("=")[::2] for part in first.split())
        return resolved(
            facts.get("NodeAddr", self._names[0]), f"Slurm's NodeAddr of {self._names[0]}"
        )

    def start(self, join: Joining) -> None:
        """Start the step. Errors: RunError without srun."""
        if shutil.which("srun") is None:
            raise RunError(
                "agents are started by srun, which is not on this host's PATH; have Slurm's"
                " commands there"
            )
        self._log = Path(join.folder) / "logs" / "slurm-agents.log"
        self._step = started(
            self.command(self._log),
            environment={**os.environ, **join.agent().to_environ()},
            stdin=subprocess.DEVNULL,
        )

    def command(self, log: Path) -> Sequence[str]:
        """One task per host with all that the job has there, which ends when any of them fails."""
        return (
            "srun",
            "--export=ALL",
            "--kill-on-bad-exit=1",
            f"--nodes={self.hosts}",
            f"--ntasks={self.hosts}",
            "--ntasks-per-node=1",
            "--whole",
            "--overlap",
            "--cpu-bind=none",
            "--mpi=none",
            "--label",
            "--open-mode=append",
            f"--output={log}",
            "sh",
            "-c",
            _AGENT,
            sys.executable,
        )

    def ended(self) -> list[str]:
        """That the step has ended, with its last lines."""
        if self._step is None or self._step.poll() is None:
            return []
        how, self._step = self._step.state, None
        last_line = tail(self._log).strip().rpartition("\n")[2] if self._log is not None else ""
        return [f"srun {how}, and all agents with it; the last it said in {self._log}: {last_line}"]

    def stop(self) -> None:
        """Wait for the step, whose agents were asked to end, and end it; the job goes on with
        whatever follows.
        """
        if self._step is not None and not self._step.ended_within(_STOP_S):
            self._step.signal(signal.SIGTERM)
            self._step.end(_STOP_S)
        self._step = None


def _asked(*command: str) -> str:
    """What a command of Slurm answers. Errors: RunError."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        answer = str(getattr(error, "stderr", None) or error).strip()
        raise RunError(
            f"Slurm does not say which hosts the job has: {command[0]}: {answer}; see sinfo"
        ) from error


def _local(wish: str) -> Launcher:
    if not wish.isdecimal():
        raise GraphError(
            f"--on local says how many hosts, but got {wish!r}; write it as --on local:3"
        )
    return local(int(wish))


def _ray(wish: str) -> Launcher:
    if wish and not wish.isdecimal():
        raise GraphError(
            f"--on ray says how many hosts, or nothing for all that there are, but got {wish!r};"
            " write it as --on ray:3"
        )
    return ray(hosts=int(wish) if wish else None)


def _slurm(wish: str) -> Launcher:
    _nothing("slurm", wish)
    return Slurm()


def _torchrun(wish: str) -> Launcher:
    _nothing("torchrun", wish)
    if HOSTED.get() is None:
        become_agent(os.environ, Limits().start_s)
    return Torchrun()


def _nothing(name: str, wish: str) -> None:
    if wish:
        raise GraphError(
            f"--on {name} takes all hosts that it is started on, but got {wish!r}; write --on"
            f" {name}"
        )


LAUNCHERS: Mapping[str, Callable[[str], Launcher]] = {
    "local": _local,
    "ray": _ray,
    "slurm": _slurm,
    "torchrun": _torchrun,
}
"""By name; each gets what stands behind the colon."""


def known_hosts(launcher: Launcher) -> list[Host]:
    """Its hosts, before any has joined. Errors: GraphError where only they know what they have."""
    if isinstance(launcher, Local):
        return launcher.parts()
    raise GraphError(
        "what the hosts have is known once they have joined, so there is no plan to look at before;"
        " start the run: its plan is in config.json and graph.svg of its folder"
    )


def launcher_named(text: str) -> Launcher:
    """`local:3` as a launcher; of torchrun's processes rank 0 gets one, others become agents.
    Errors: GraphError.
    """
    name, _, wish = text.partition(":")
    if name not in LAUNCHERS:
        raise GraphError(
            f"--on is {text!r}, but there are the launchers"
            f" {sorted(LAUNCHERS)}{nearest(name, LAUNCHERS)}; name one of these, or leave it out to"
            " run on this machine"
        )
    return LAUNCHERS[name](wish)
