"""What a scheduler knows of the agent of one host."""

import re
from dataclasses import dataclass, field

from dataflow.agent.forkserver_messages import AllHanded, Handed
from dataflow.agent.messages import Built, Join
from dataflow.planning.hosts import Host


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
            gpu_memory_bytes=join.gpu_memory_bytes, kind=join.kind,
        )  # fmt: skip


def natural(name: str) -> list[tuple[int, int | str]]:
    """A key by which h2 comes before h10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]
