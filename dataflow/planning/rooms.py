"""What each host has left, and where a unit of processes that must sit together fits: pure
functions.

Units on accelerators fill host after host: an accelerator has one owner, so a full host is no
overloaded one, and neighbours exchange by memory. Units on the CPU go where there are fewest
processes per core, as they share the cores.
"""

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from dataflow.planning.hosts import Devices, Host
from dataflow.planning.placement import amount

_SHOWN = 4
"""Hosts that a refusal lists, at most."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What sits on one host together: the ranks of a replica, or all replicas of the nodes that
    share devices.
    """

    gpus: int = 0
    """Accelerators, in a row; 0: it runs on the CPU."""
    processes: int = 1
    """Processes that compute at the same time."""
    cores: int = 1
    """Processes that share out one replica, where it runs on the CPU: at least a core for each."""
    memory_bytes: int = 0
    """Bytes of main memory, as far as known."""
    gpu_memory_bytes: int = 0
    """Bytes of each accelerator's memory, as far as known."""

    def __str__(self) -> str:
        if self.gpus:
            memory = f" of {amount(self.gpu_memory_bytes)}" if self.gpu_memory_bytes else ""
            return (
                f"{self.gpus}"
                f" GPU{'s' if self.gpus > 1 else ''}{memory}{' in a row' if self.gpus > 1 else ''}"
            )
        memory = f" and {amount(self.memory_bytes)} of memory" if self.memory_bytes else ""
        return f"{self.cores} core{'s' if self.cores > 1 else ''}{memory}"


@dataclass(kw_only=True)
class Room:
    """One host, and what of it is taken."""

    host: Host
    first_gpu: int = 0
    """Number of its first accelerator over all hosts."""
    busy: set[int] = field(default_factory=set)
    """Accelerators, by their numbers over all hosts."""
    processes: int = 0
    memory_bytes: int = 0

    @property
    def numbers(self) -> range:
        """Numbers of its accelerators, over all hosts."""
        return range(self.first_gpu, self.first_gpu + self.host.gpus)

    @property
    def load(self) -> float:
        """Processes per core."""
        return self.processes / self.host.cpus

    def lacks_memory(self, unit: Unit) -> bool:
        """Whether a unit is known not to fit into memory."""
        if unit.gpus:
            return (
                bool(self.host.gpu_memory_bytes)
                and unit.gpu_memory_bytes > self.host.gpu_memory_bytes
            )
        return (
            bool(self.host.memory_bytes)
            and self.memory_bytes + unit.memory_bytes > self.host.memory_bytes
        )

    def row(self, unit: Unit) -> tuple[int, ...] | None:
        """The accelerators that a unit would have here; None: there are not enough, or not enough
        cores.
        """
        if unit.gpus:
            return spare(self.numbers, self.busy, unit.gpus)
        return () if unit.cores <= self.host.cpus or not self.host.name else None

    def take(self, unit: Unit, gpus: tuple[int, ...]) -> None:
        """Seat a unit here."""
        self.busy.update(gpus)
        self.processes += unit.processes
        self.memory_bytes += 0 if unit.gpus else unit.memory_bytes

    def told(self, unit: Unit) -> str:
        """What the host has of what a unit needs, as text."""
        if unit.gpus:
            memory = (
                f" of {amount(self.host.gpu_memory_bytes)}" if self.host.gpu_memory_bytes else ""
            )
            return (
                f"'{self.host.name}' has {self.host.gpus - len(self.busy)} of {self.host.gpus}"
                f" GPUs{memory} free"
            )
        free = (
            f", {amount(self.host.memory_bytes - self.memory_bytes)} free"
            if self.host.memory_bytes
            else ""
        )
        return f"'{self.host.name}' has {self.host.cpus} cores{free}"


def spare(numbers: range, busy: Collection[int], count: int) -> tuple[int, ...] | None:
    """The first row of free accelerators, as long as asked for; None: there is none."""
    free = 0
    for number in numbers:
        free = 0 if number in busy else free + 1
        if free == count:
            return tuple(range(number - count + 1, number + 1))
    return None


def rooms_of(devices: Devices) -> list[Room]:
    """Every machine, empty."""
    pairs = zip(devices.machines, devices.first_gpus, strict=True)
    return [Room(host=host, first_gpu=first) for host, first in pairs]


def settle(rooms: Sequence[Room], unit: Unit, count: int = 1) -> list[tuple[Room, tuple[int, ...]]]:
    """Seat as many units as fit, `count` at most: rooms and accelerators of each. Known memory is
    kept to where it can be, elsewhere only where nothing else is left.
    """
    if not unit.gpus:
        return _spread(rooms, unit, count)
    seated: list[tuple[Room, tuple[int, ...]]] = []
    for room in sorted(rooms, key=lambda room: room.lacks_memory(unit)):
        while len(seated) < count and (row := room.row(unit)) is not None:
            room.take(unit, row)
            seated.append((room, row))
    return seated


def _spread(rooms: Sequence[Room], unit: Unit, count: int) -> list[tuple[Room, tuple[int, ...]]]:
    """One after the other to where, with it, there are fewest processes per core."""

    def weighed(at: int) -> tuple[bool, float, int]:
        room = rooms[at]
        return room.lacks_memory(unit), (room.processes + unit.processes) / room.host.cpus, at

    heap = [weighed(at) for at, room in enumerate(rooms) if room.row(unit) is not None]
    heapq.heapify(heap)
    seated: list[tuple[Room, tuple[int, ...]]] = []
    while heap and len(seated) < count:
        at = heap[0][-1]
        rooms[at].take(unit, ())
        seated.append((rooms[at], ()))
        heapq.heapreplace(heap, weighed(at))
    return seated


def shortage(rooms: Iterable[Room], unit: Unit) -> str:
    """Of hosts that a unit does not fit on: what each has, the roomiest first."""
    sizes = sorted(
        rooms,
        key=lambda room: -(room.host.gpus - len(room.busy) if unit.gpus else room.host.cpus),
    )
    rooms_told = [room.told(unit) for room in sizes[:_SHOWN]]
    rooms_told += [f"{len(sizes) - _SHOWN} more have no more"] if len(sizes) > _SHOWN else []
    return ", ".join(rooms_told) or "there is none"
