"""What a plan maps onto: this machine, or several hosts, and what these have together."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from dataflow.errors import GraphError
from dataflow.system.messages import Natural

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,252}")


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine of a run; plain values, the same in every process.

    >>> from dataflow.planning.hosts import Host
    >>> Host(name="a", cpus=8, gpus=2)
    Host(name='a', cpus=8, gpus=2, memory_bytes=0, gpu_memory_bytes=0, kind='', own_folder=False)
    """

    name: str
    """Unique in the run; empty: this machine, where there is no other."""
    cpus: Natural
    """Cores."""
    gpus: Natural = 0
    """Accelerators."""
    memory_bytes: Natural = 0
    """Main memory; 0: unknown."""
    gpu_memory_bytes: Natural = 0
    """Memory of each accelerator; 0: unknown."""
    kind: str = ""
    """For people: what accelerators, or what machine."""
    own_folder: bool = False
    """Whether it does not see the scheduler's run folder, and has one of its own."""

    def __post_init__(self) -> None:
        if self.name and not _NAME.fullmatch(self.name):
            raise GraphError(
                f"a host is called {self.name!r}, which no file and no flag can name; give it a"
                " name of letters, digits, '.', '_', ':' and '-'"
            )
        least = {"cpus": 1, "gpus": 0, "memory_bytes": 0, "gpu_memory_bytes": 0}
        for number, bound in least.items():
            if getattr(self, number) < bound:
                raise GraphError(
                    f"host '{self.name}' is said to have {number}={getattr(self, number)}; give"
                    f" {bound} or more"
                )

    @property
    def room(self) -> dict[str, int]:
        """Bytes by device, 0 where unknown."""
        return {"cpu": self.memory_bytes} | {
            f"cuda:{number}": self.gpu_memory_bytes for number in range(self.gpus)
        }


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What a plan maps onto: numbers of one machine, or the sums of several hosts (`Devices.of`).

    >>> from dataflow import Devices
    >>> Devices(cpus=8, gpus=2).cpus
    8
    """

    cpus: Natural
    """Cores."""
    gpus: Natural = 0
    """Accelerators; they are numbered host by host."""
    memory_bytes: Natural = 0
    """Main memory; 0: unknown."""
    gpu_memory_bytes: Natural = 0
    """Memory of each accelerator, of the smallest where they differ; 0: unknown."""
    link_bytes_per_s: float | None = None
    """Of the network between machines, each way; None: unknown, and then no weights travel as
    deltas."""
    hosts: tuple[Host, ...] = ()
    """The machines of the run; empty: this one alone."""

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        twice = (
            sorted({name for name in names if names.count(name) > 1})
            if len(set(names)) < len(names)
            else []
        )
        if twice or not all(names):
            raise GraphError(
                f"the hosts of a run need names of their own, but found {names}; "
                f"rename {' and '.join(map(repr, twice or ['']))}"
            )
        assert not self.hosts or self.gpus == sum(host.gpus for host in self.hosts), (
            "make it with Devices.of"
        )

    @classmethod
    def of(cls, hosts: Sequence[Host], link_bytes_per_s: float | None = None) -> "Devices":
        """What several hosts have together; their order is that of their accelerators' numbers.

        Raises GraphError for no host, and for names that are not unique.

        >>> from dataflow.planning.hosts import Host
        >>> Devices.of([Host(name="a", cpus=8, gpus=2), Host(name="b", cpus=4)]).cpus
        12
        """
        if not hosts:
            raise GraphError(
                "a run is to be planned over hosts, but there are none; give it one or more"
            )
        gpu_memory = [host.gpu_memory_bytes for host in hosts if host.gpus]
        memory = [host.memory_bytes for host in hosts]
        return cls(
            cpus=sum(host.cpus for host in hosts),
            gpus=sum(host.gpus for host in hosts),
            memory_bytes=sum(memory) if all(memory) else 0,
            gpu_memory_bytes=min(gpu_memory, default=0),
            link_bytes_per_s=link_bytes_per_s,
            hosts=tuple(hosts),
        )

    @cached_property
    def machines(self) -> tuple[Host, ...]:
        """The hosts; of a run without any, this machine, whose name is empty."""
        return self.hosts or (
            Host(
                name="",
                cpus=self.cpus,
                gpus=self.gpus,
                memory_bytes=self.memory_bytes,
                gpu_memory_bytes=self.gpu_memory_bytes,
            ),
        )

    @cached_property
    def first_gpus(self) -> tuple[int, ...]:
        """By machine, the number of its first accelerator."""
        return tuple(accumulate((host.gpus for host in self.machines[:-1]), initial=0))

    def host_of(self, gpu: int) -> Host:
        """The machine that has an accelerator, by its number over all of them."""
        assert 0 <= gpu < self.gpus, f"there is no accelerator {gpu} of {self.gpus}"
        return self.machines[bisect_right(self.first_gpus, gpu) - 1]

    def number_there(self, gpu: int) -> int:
        """The number that an accelerator has on its own machine."""
        return gpu - self.first_gpus[bisect_right(self.first_gpus, gpu) - 1]

    @property
    def room(self) -> dict[tuple[str, str], int]:
        """Bytes by machine and device, 0 where unknown."""
        return {
            (host.name, device): size
            for host in self.machines
            for device, size in host.room.items()
        }


def named(hosts: Iterable[str], most: int = 3) -> str:
    """Names for people, each once: `a, b and c`, `a, b and 510 more`."""
    names = list(dict.fromkeys(hosts))
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1] if names else "")))
