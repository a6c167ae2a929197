"""Agents on this machine, as child processes: to try a run over hosts out, and to test one."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dataflow.agent.agent import log_name
from dataflow.agent.environment import ended_agent, start_agent
from dataflow.errors import GraphError
from dataflow.launchers.launcher import Joining
from dataflow.planning.hosts import Host
from dataflow.planning.this_machine import this_machine
from dataflow.system.child import Child
from dataflow.system.files import tail

_END_S = 5.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One agent that is to be started."""

    host: str
    address: str = LOOPBACK
    prefix: tuple[str, ...] = ()
    """A command that runs it, such as nsenter."""
    cpus: str = ""
    """How many cores it has, where that is not its share."""
    gpus: str = ""
    """The same of accelerators."""


@dataclass
class Local:
    """As `local` makes it. A Launcher."""

    slots: Sequence[Slot]
    listen: str = LOOPBACK
    _agents: dict[str, Child] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    _folder: str = ""

    @property
    def hosts(self) -> int:
        return len(self.slots)

    def parts(self) -> list[Host]:
        """What each agent says that its host has: an equal share of this machine's cores and
        accelerators.
        """
        machine, count = this_machine(), len(self.slots)
        return [
            Host(
                name=slot.host,
                cpus=max(1, machine.cpus // count),
                gpus=len(_share(number, count, machine.gpus)),
                memory_bytes=machine.memory_bytes,
                gpu_memory_bytes=machine.gpu_memory_bytes,
            )
            for number, slot in enumerate(self.slots)
        ]

    def start(self, join: Joining) -> None:
        count, gpus = len(self.slots), this_machine().gpus
        self._folder = join.folder
        for number, (slot, part) in enumerate(zip(self.slots, self.parts(), strict=True)):
            environment = join.agent(
                host=slot.host,
                address=slot.address,
                cpus=slot.cpus or str(part.cpus),
                gpus=slot.gpus or str(part.gpus),
            )
            visible = (
                {"CUDA_VISIBLE_DEVICES": ",".join(map(str, _share(number, count, gpus)))}
                if gpus
                else {}
            )
            with self._log(slot.host).open("ab") as log:
                self._agents[slot.host] = start_agent(
                    environment,
                    join.keys,
                    visible,
                    prefix=slot.prefix,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def ended(self) -> list[str]:
        notices = []
        for host, agent in self._agents.items():
            status = agent.poll()
            if status is not None and host not in self._told:
                self._told.add(host)
                notices.append(ended_agent(host, agent, tail(self._log(host))))
        return notices

    def stop(self) -> None:
        for agent in self._agents.values():
            if agent.poll() is None:
                agent.signal(signal.SIGTERM)
        for agent in self._agents.values():
            agent.end(_END_S)

    def _log(self, host: str) -> Path:
        return Path(self._folder) / "logs" / log_name(host)


def _share(number: int, count: int, gpus: int) -> range:
    return range(number * gpus // count, (number + 1) * gpus // count)


def local(count: int) -> Local:
    """For `run(graph, on=local(3))`: so many agents on this machine, each with a socket folder of
    its own; hosts h1, h2, ..., which share its cores and accelerators, all on loopback.

    Errors: GraphError.

    >>> from dataflow.launchers.local import local
    >>> [slot.host for slot in local(2).slots]
    ['h1', 'h2']
    """
    if count < 1:
        raise GraphError(f"local({count}) starts {count} agents; give a number above 0")
    return Local([Slot(host=f"h{number + 1}") for number in range(count)])
