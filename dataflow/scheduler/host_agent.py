"""What a scheduler knows of the agent of one host."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dataflow.agent.forkserver_messages import AllHanded, Handed, Spawn
from dataflow.agent.messages import Begin, Built, Join
from dataflow.folder.ledger.places import HOME
from dataflow.planning.hosts import Host

_CLOSED_S = 1.5
"""A host whose connection is closed for so long is lost: its agent has ended, or would have come back."""
_SPEAKS_S = 2.0
"""Within which an agent is heard that is not cut off: less than it takes to give a connection up."""


@dataclass
class HostAgent:
    """One host of the run, and who speaks for it."""

    join: Join
    identity: bytes
    built: Built | None = None
    handed: dict[str, Handed] = field(default_factory=dict)
    all_handed: AllHanded | None = None
    is_paused: bool = False
    is_clearing: bool = False
    """Whether all of its workers are to end."""
    has_left: bool = False
    """Whether it said that it ends, or its connection is closed."""
    heard_at: float = 0.0
    closed_since: float | None = None
    """Since when what is sent there cannot leave."""
    asked_at: float = 0.0
    """When it was asked last which workers it has."""

    @property
    def host(self) -> Host:
        """As a plan has it."""
        join = self.join
        return Host(
            name=join.name, cpus=join.cpus, gpus=join.gpus, memory_bytes=join.memory_bytes,
            gpu_memory_bytes=join.gpu_memory_bytes, kind=join.kind, own_folder=bool(join.files),
        )  # fmt: skip

    @property
    def may_answer(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return not self.has_left and self.closed_since is None

    @property
    def place(self) -> dict[str, str]:
        """What is particular in the settings of a worker there."""
        join = self.join
        return {
            "sockets": join.sockets, "listen": join.address, "folder": join.folder,
            "disk": join.name if join.files else HOME,
        }  # fmt: skip


def has_gone(agent: HostAgent, now: float) -> bool:
    """Whether an agent has ended, as its connection is closed. One that was silent before has given that connection up
    itself, because the network was cut, and makes another."""
    closed = agent.closed_since
    return closed is not None and now - closed > _CLOSED_S and closed - agent.heard_at < _SPEAKS_S


def with_doors(begin: Begin, hosts: Mapping[str, HostAgent]) -> Begin:
    """What a host is to build, and whom it has to reach."""
    return replace(begin, doors={name: each.join.door for name, each in hosts.items() if not each.has_left})


def host_of(spawn: Spawn) -> str:
    """Where a process was asked for."""
    return str(spawn.settings["host"])


def natural(name: str) -> list[tuple[int, int | str]]:
    """A key by which h2 comes before h10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]


def too_few(hosts: Collection[Host], count: int, address: str, within_s: float, folder: Path) -> str:
    """Of a run whose hosts are not all there."""
    came = ", ".join(host.name for host in hosts) or "none"
    return (
        f"the run waited {within_s:.0f} s for {count} hosts at {address}, and these came: {came}; see "
        f"that the others reach that address, and the logs of their agents in {folder}/logs, or raise "
        f"Limits.start_s"
    )


def too_late(missing: Collection[str], within_s: float, folder: Path) -> str:
    """Of hosts that have not built the graph."""
    return (
        f"the scheduler waited {within_s:.0f} s for hosts {missing} to build the graph; see the logs of "
        f"their agents in {folder}/logs, or raise Limits.start_s"
    )
