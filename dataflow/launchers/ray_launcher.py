"""The launcher on a Ray cluster: one placement group, and in each of its bundles an actor that
keeps a host's agent."""

import importlib.util
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dataflow.errors import GraphError, RunError
from dataflow.launchers.launcher import Joining
from dataflow.launchers.ray_messages import RAY, AgentEnded, Connect, Connected, PlaceAgents, Wrong
from dataflow.limits import Limits
from dataflow.system.channel import Channel
from dataflow.system.child import describe_status, end, program
from dataflow.system.messages import MessageError

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

    address: of the cluster; `auto`: the one of which this machine, or this job, is a part.
    hosts: how many; None: all that are there now. cpus, gpus: of each; None: as many as the
    smallest of them has. resources: what else each of them has to have, by Ray's names, as in
    {"rack-1": 1}. runtime_env: Ray's, for the processes on the hosts: packages, variables. The
    program itself is to be at one path everywhere: in a shared folder, or by `ray job submit
    --working-dir`. wait_s: for the cluster to answer, and then for the hosts to be free; as long as
    an autoscaler may take. Errors: GraphError.

    >>> from dataflow.launchers.ray_launcher import ray
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
    if any(each is not None and each < 1 for each in wrong.values()):
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
    _driver: "subprocess.Popen[Any] | None" = None
    _channel: "Channel[Any] | None" = None
    _connected: Connected | None = None
    _said: IO[bytes] | None = None
    """What Ray prints; of use only when the driver ends unexpectedly."""

    @property
    def hosts(self) -> int:
        """As `Launcher.hosts`. Errors: GraphError without Ray, RunError without a cluster that has
        them."""
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
        """As `Launcher.ended`."""
        if self._driver is None or self._channel is None:
            return []
        try:
            return [_text(message) for message in self._channel.arrived()]
        except (EOFError, OSError, MessageError):
            how, last = describe_status(end(self._driver, _END_S)), self._last_line()
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
            end(self._driver, _END_S)
        if self._said is not None:
            self._said.close()
        self._driver = self._channel = self._connected = self._said = None

    def _last_line(self) -> str:
        if self._said is None:
            return ""
        self._said.seek(0)
        return self._said.read().decode(errors="replace").strip().rpartition("\n")[2]

    def _connect(self) -> tuple[Channel[Any], Connected]:
        """Have the driver find the cluster, once."""
        if self._channel is None or self._connected is None:
            if importlib.util.find_spec("ray") is None:
                raise GraphError(
                    "--on ray needs Ray, which is not installed; pip install 'dataflow-rl[ray]'"
                )
            self._channel, theirs = Channel.pair(RAY, _SEND_S)
            self._said = tempfile.TemporaryFile()  # noqa: SIM115
            self._driver = program(
                "dataflow.launchers.ray_driver",
                end=theirs,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                start_new_session=True,
            )
            theirs.close()
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
            last = self._last_line()
            if self._driver is not None:
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


def _text(message: AgentEnded | Wrong) -> str:
    return message.why if isinstance(message, AgentEnded) else message.error
