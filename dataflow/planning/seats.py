"""Which host each worker is on, with which of its accelerators: one pure function, for the start of
a run and for any time after it.

`settle` gives a seat to each replica that needs one, and is told what is fixed: replicas that stay
where they are, hosts that are left, those that a node may not use. At the start every replica needs
a seat, and only what the user says with `place=` is fixed.

What must sit together is a unit: the ranks of one replica; all replicas of nodes that take turns on
devices. Pinned units are seated first, then those on accelerators, then those on the CPU, the
largest first. Units on accelerators fill host after host: an accelerator has one owner, so a full
host is no overloaded one, and neighbours exchange by memory. Units on the CPU go where there are
fewest processes per core, as they share the cores. The ranks of a trainer that no host has room for
are spread over several, those of others are not: each token would wait for the network in each
layer. Who takes turns goes where one of its group is already, which has a place for all of them.
Light workers come last, each beside as many of its neighbours as there are on one host; between
equals it is the host of the one that feeds it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dataflow.errors import GraphError
from dataflow.node import Split
from dataflow.planning.gpu_groups import Group
from dataflow.planning.hosts import Devices, Host
from dataflow.planning.inputs import Pins
from dataflow.planning.placement import Need, amount

_SHOWN = 4
"""Hosts that a refusal lists, at most."""

Replica = tuple[str, int]
"""A worker as the plan calls it, and the number of a replica; those that the plan has not are
newcomers."""


class Seat(NamedTuple):
    """Where a replica is."""

    host: str
    """That of its rank 0; empty: this machine, where there is no other."""
    gpus: tuple[int, ...] = ()
    """Its accelerators, rank by rank, numbered over all hosts."""
    rank_hosts: tuple[str, ...] = ()
    """The host of each rank, where they are on several; else nothing."""

    def ranks(self, count: int) -> Mapping[str, int]:
        """By host, how many of so many ranks are there."""
        return Counter(self.rank_hosts or {self.host: count})


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What `settle` does not change."""

    seats: Mapping[Replica, Seat] = field(default_factory=dict)
    """Of replicas that stay; those on hosts that are not left do not count."""
    hosts: Collection[str] | None = None
    """Names of those that are left; None: all are."""
    barred: Mapping[str, Collection[str]] = field(default_factory=dict)
    """By worker, hosts that it may not use."""
    pins: Pins = field(default_factory=dict)
    """By worker, or first node of a group, the hosts that the user names."""


@dataclass(frozen=True, kw_only=True)
class NodeNeeds:
    """A node of the graph, before it has a place."""

    replicas: int = 1
    ranks: int = 1
    gpus: int = 0
    """Accelerators of all its replicas; 0: it runs on the CPU."""
    need: Need | None = None
    """Memory that one process needs at least; None: unknown or small."""
    may_spread: bool = False
    """Whether its ranks may be on several hosts."""
    split: Split = Split()
    port: int = 0
    """On which each replica listens; 0: on none, or on any that is free."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """As of its `Placement`."""
    arrives_in_host: bool = False
    """As of `Traits`."""

    def of_ranks(self, ranks: int) -> NodeNeeds:
        """The needs of so many ranks of a replica, on a host."""
        return replace(self, replicas=1, ranks=ranks, gpus=ranks if self.gpus else 0)


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
    ports: tuple[int, ...] = ()
    """On which it listens."""

    @classmethod
    def of(cls, *parts: NodeNeeds) -> Unit:
        """All replicas of nodes of which one is awake at a time, or of one node."""
        needs = [part.need.total * part.replicas * part.ranks if part.need else 0 for part in parts]
        gpus = max(part.gpus for part in parts)
        return cls(
            gpus=gpus,
            processes=max(part.replicas * part.ranks for part in parts),
            cores=max(part.ranks for part in parts),
            memory_bytes=max(needs),
            gpu_memory_bytes=max(needs) // gpus if gpus else 0,
            ports=tuple(part.port for part in parts if part.port),
        )

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
    ports: set[int] = field(default_factory=set)

    @property
    def numbers(self) -> range:
        """Numbers of its accelerators, over all hosts."""
        return range(self.first_gpu, self.first_gpu + self.host.gpus)

    def load(self, more: int = 0) -> float:
        """Processes per core, with so many more."""
        return (self.processes + more) / self.host.cpus

    def lacks(self, unit: Unit) -> bool:
        """Whether memory is known not to suffice for a unit, or another has its port. This machine
        alone is taken as it is.
        """
        if not self.host.name:
            return False
        has, wants = self.host.memory_bytes, self.memory_bytes + unit.memory_bytes
        if unit.gpus:
            has, wants = self.host.gpu_memory_bytes, unit.gpu_memory_bytes
        return 0 < has < wants or not self.ports.isdisjoint(unit.ports)

    def row(self, unit: Unit) -> tuple[int, ...] | None:
        """The accelerators that a unit would have here; None: there are not enough, or not enough
        cores.
        """
        if unit.gpus:
            return spare(self.numbers, self.busy, unit.gpus)
        return () if unit.cores <= self.host.cpus or not self.host.name else None

    def take(self, unit: Unit, gpus: Iterable[int]) -> None:
        """Seat a unit here, with those of some accelerators that are here."""
        self.busy.update(gpu for gpu in gpus if gpu in self.numbers)
        self.ports.update(unit.ports)
        self.processes += unit.processes
        self.memory_bytes += 0 if unit.gpus else unit.memory_bytes

    def told(self, unit: Unit) -> str:
        """What the host has of what a unit needs, as text."""
        name = f"'{self.host.name}'"
        if port := next(iter(self.ports.intersection(unit.ports)), 0):
            return f"{name} has another worker on port {port}"
        if unit.gpus:
            has = self.host.gpu_memory_bytes
            memory = f" of {amount(has)}" if has else ""
            count = self.host.gpus - len(self.busy)
            return f"{name} has {count} of {self.host.gpus} GPUs{memory} free"
        has = self.host.memory_bytes
        free = f", {amount(has - self.memory_bytes)} free" if has else ""
        return f"{name} has {self.host.cpus} cores{free}"


RoomSeat = tuple[Room, tuple[int, ...]]
"""A machine, and accelerators of it."""


def spare(numbers: range, busy: Collection[int], count: int) -> tuple[int, ...] | None:
    """The first row of free accelerators, as long as asked for; None: there is none."""
    free = 0
    for number in numbers:
        free = 0 if number in busy else free + 1
        if free == count:
            return tuple(range(number - count + 1, number + 1))
    return None


def divisions(ranks: int, hosts: int, split: Split) -> list[int]:
    """Numbers of hosts, `hosts` at most, that so many ranks can be spread over evenly, what is
    preferred first.

    >>> from dataflow.node import Split
    >>> divisions(16, 8, Split(tensor_parallel=4))
    [2, 4, 8]
    >>> divisions(12, 6, Split(dp_replicate=3))  # of 4 ranks each: none is cut over 3 or 6
    [3, 6, 2, 4]
    """
    copy = ranks // split.dp_replicate

    def cost(count: int) -> tuple[bool, bool, int]:
        ranks_each = ranks // count
        return (
            bool(ranks_each % split.tensor_parallel),
            bool(ranks_each % copy and copy % ranks_each),
            count,
        )

    return sorted((count for count in range(2, hosts + 1) if ranks % count == 0), key=cost)


def settle(
    needs: Mapping[str, NodeNeeds],
    devices: Devices,
    turns: Sequence[Group],
    neighbours: Mapping[str, Sequence[str]],
    wanted: Iterable[Replica],
    fixed: Fixed,
    *,
    may_lack: bool = False,
) -> tuple[dict[Replica, Seat], dict[str, str]]:
    """A seat for each wanted replica that there is room for; by worker, what the others need and
    what there is.

    Args:
        needs: of all nodes that are not light, in the order in which accelerators are numbered.
        neighbours: by light worker, those that it is to be beside.
        may_lack: whether a unit goes to a host that lacks memory or a port for it where no other
            is left; else it has no room there.

    >>> from dataflow.planning.hosts import Devices, Host
    >>> devices = Devices.of([Host(name="a", cpus=4), Host(name="b", cpus=4)])
    >>> needs = {"trainer": NodeNeeds()}
    >>> settle(needs, devices, (), {}, [("trainer", 0)], Fixed())[0]
    {('trainer', 0): Seat(host='a', gpus=(), rank_hosts=())}
    >>> settle(needs, devices, (), {}, [("trainer", 0)], Fixed(hosts={"b"}))[0]
    {('trainer', 0): Seat(host='b', gpus=(), rank_hosts=())}
    """
    rooms = [
        Room(host=host, first_gpu=first)
        for host, first in zip(devices.machines, devices.first_gpus, strict=True)
        if fixed.hosts is None or host.name in fixed.hosts
    ]
    seating = _Seating(needs=needs, rooms=rooms, fixed=fixed, may_lack=may_lack)
    for worker, number in wanted:
        seating.missing.setdefault(worker, []).append(number)
    nodes = dict.fromkeys(
        next((group for group in turns if node in group), (node,)) for node in needs
    )
    parties = [seating.party(group) for group in nodes]
    if len(devices.machines) > 1:
        parties.sort(
            key=lambda party: (
                not party.pins,
                not party.unit.gpus,
                -(party.unit.gpus or party.unit.cores),
            )
        )
    for party in parties:
        seating.keep(party)
    for party in parties:
        seating.seat(party)
    for worker, mates in neighbours.items():
        if worker in seating.missing:
            seating.seat_beside(worker, mates)
    return seating.seats, seating.refusals


@dataclass(frozen=True, kw_only=True)
class _Party:
    """A node, or nodes that take turns."""

    nodes: Group
    unit: Unit
    """Of one replica, or of all nodes that take turns."""
    pins: tuple[str, ...]

    def told(self, count: int) -> str:
        """So many units of it, as text."""
        if len(self.nodes) > 1:
            return (
                f"the group of {', '.join(map(repr, self.nodes[:-1]))} and '{self.nodes[-1]}',"
                " which take turns,"
            )
        return f"each replica of '{self.nodes[0]}'" if count > 1 else f"'{self.nodes[0]}'"


@dataclass(kw_only=True)
class _Seating:
    """`settle` under way."""

    needs: Mapping[str, NodeNeeds]
    rooms: Sequence[Room]
    """Of hosts that are left."""
    fixed: Fixed
    may_lack: bool
    missing: dict[str, list[int]] = field(default_factory=dict)
    """By worker, the replicas that need a seat."""
    stay: dict[Replica, Seat] = field(init=False)
    seats: dict[Replica, Seat] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hosts = {room.host.name for room in self.rooms}
        self.stay = {
            replica: seat for replica, seat in self.fixed.seats.items() if seat.host in hosts
        }

    def of(self, *workers: str) -> dict[Replica, Seat]:
        """All seats of some workers."""
        return {
            replica: seat
            for seats in (self.stay, self.seats)
            for replica, seat in seats.items()
            if replica[0] in workers
        }

    def open_to(self, worker: str) -> list[Room]:
        """Where a worker may go."""
        barred = self.fixed.barred.get(worker, ())
        return [room for room in self.rooms if room.host.name not in barred]

    def party(self, nodes: Group) -> _Party:
        parts = [self.needs[node] for node in nodes]
        unit = Unit.of(*parts) if len(parts) > 1 else Unit.of(parts[0].of_ranks(parts[0].ranks))
        return _Party(nodes=nodes, unit=unit, pins=self.fixed.pins.get(nodes[0], ()))

    def block(self, party: _Party) -> Sequence[int]:
        """The accelerators that a group has for its planned replicas; none, if none of these has a
        seat.
        """
        for (node, number), seat in self.of(*party.nodes).items():
            if seat.gpus and number < self.needs[node].replicas:
                first = seat.gpus[0] - number * self.needs[node].ranks
                return range(first, first + party.unit.gpus)
        return ()

    def keep(self, party: _Party) -> None:
        """Take what those have who stay: a group has its room even while some of it are away."""
        stay, rooms = self.of(*party.nodes), {room.host.name: room for room in self.rooms}
        is_group, counts = len(party.nodes) > 1, Counter(node for node, _ in stay)
        if is_group and stay:
            parts = [(self.needs[node], counts[node]) for node in party.nodes]
            grown = [replace(part, replicas=max(part.replicas, count)) for part, count in parts]
            rooms[next(iter(stay.values())).host].take(Unit.of(*grown), self.block(party))
        for (node, _), seat in stay.items():
            part = self.needs[node]
            for host, ranks in seat.ranks(part.ranks).items():
                if is_group:
                    rooms[host].busy.update(seat.gpus)
                elif host in rooms:
                    whole = ranks == part.ranks
                    unit = party.unit if whole else Unit.of(part.of_ranks(ranks))
                    rooms[host].take(unit, seat.gpus)

    def seat(self, party: _Party) -> None:
        """Seat what is missing of a party."""
        numbers = {node: self.missing[node] for node in party.nodes if node in self.missing}
        if len(party.nodes) > 1 and numbers:
            self._seat_group(party, numbers)
        elif numbers:
            self._seat_replicas(party, numbers[party.nodes[0]])

    def _seat_replicas(self, party: _Party, numbers: Sequence[int]) -> None:
        (node,) = party.nodes
        rooms, part = self.open_to(node), self.needs[node]
        spreads = part.may_spread and part.ranks > 1 and len(party.pins) != 1
        if spreads and (seat := self._spread(party, rooms)):
            self.seats[node, numbers[0]] = seat
            return
        fitting = self._find(party, rooms, len(numbers))
        for number, (room, gpus) in zip(numbers, fitting, strict=False):
            self.seats[node, number] = Seat(room.host.name, gpus)
        if len(fitting) < len(numbers):
            more = ", or an equal part of that on each of several" * (spreads and len(rooms) > 1)
            if fitting:
                more += f", of {len(numbers)} that are asked for {len(fitting)} found one"
            self._refuse(node, party.told(len(numbers)), party.unit, rooms, more)

    def _seat_group(self, party: _Party, numbers: Mapping[str, Sequence[int]]) -> None:
        """Planned replicas have their part of the group's accelerators, newcomers any that no other
        replica of their node has.
        """
        rooms, mates = self.open_to(party.nodes[0]), self.of(*party.nodes)
        block = self.block(party)
        if mates:
            host = next(iter(mates.values())).host
            room = next(room for room in self.rooms if room.host.name == host)
        elif fitting := self._find(party, rooms, 1):
            room, block = fitting[0]
        else:
            for node in numbers:
                self._refuse(node, party.told(1), party.unit, rooms)
            return
        shared = {*block, *(gpu for seat in mates.values() for gpu in seat.gpus)}
        for node in numbers:
            part, free = self.needs[node], Unit(gpus=self.needs[node].ranks)
            for number in numbers[node]:
                gpus: tuple[int, ...] | None = ()
                if part.gpus and block and number < part.replicas:
                    first = block[0] + number * part.ranks
                    gpus = tuple(range(first, first + part.ranks))
                elif part.gpus:
                    own = {gpu for seat in self.of(node).values() for gpu in seat.gpus}
                    gpus = spare(room.numbers, room.busy - shared | own, part.ranks)
                if gpus is None:
                    self._refuse(node, f"'{node}'", free, [room])
                    break
                self.seats[node, number] = Seat(room.host.name, gpus)
                room.busy.update(gpus)
                shared.update(gpus)

    def seat_beside(self, worker: str, mates: Iterable[str]) -> None:
        """Seat a light worker where most of its neighbours have somebody, the first of equals;
        where there is none, on the host of the least load.
        """
        rooms = self.open_to(worker)
        if not rooms:
            self._refuse(worker, f"'{worker}'", Unit(), rooms)
            return
        loads = {room.host.name: room.load() for room in rooms}
        counts: Counter[str] = Counter()
        for mate in mates:
            hosts = dict.fromkeys(seat.host for seat in self.of(mate).values())
            counts.update(host for host in hosts if host in loads)
        beside = (
            max(counts, key=counts.__getitem__) if counts else min(loads, key=loads.__getitem__)
        )
        host = next(iter(self.fixed.pins.get(worker, ())), beside)
        self.seats |= {(worker, number): Seat(host) for number in self.missing[worker]}

    def _find(self, party: _Party, rooms: Sequence[Room], count: int) -> list[RoomSeat]:
        """Rooms and accelerators of as many units as fit, `count` at most, taken one after the
        other: pinned ones on the hosts in turn. GraphError where these have no room.
        """
        unit, fitting = party.unit, []
        for number in range(count if party.pins else 0):
            name = party.pins[number % len(party.pins)]
            room = next(room for room in rooms if room.host.name == name)
            row = room.row(unit)
            if row is None:
                raise GraphError(
                    f"{party.told(count)} needs {unit} on host '{name}', where place puts it, but"
                    f" {room.told(unit)}; name another host, or ask for less"
                )
            room.take(unit, row)
            fitting.append((room, row))

        def weighed(at: int) -> tuple[bool, float, int]:
            room = rooms[at]
            return room.lacks(unit), 0.0 if unit.gpus else room.load(unit.processes), at

        heap = [] if party.pins else [weighed(at) for at in range(len(rooms))]
        heapq.heapify(heap)
        while heap and len(fitting) < count:
            lacks, _, at = heap[0]
            row = None if lacks and not self.may_lack else rooms[at].row(unit)
            if row is None:
                heapq.heappop(heap)
                continue
            rooms[at].take(unit, row)
            fitting.append((rooms[at], row))
            heapq.heapreplace(heap, weighed(at))
        return fitting

    def _spread(self, party: _Party, rooms: Sequence[Room]) -> Seat | None:
        """The seat of a trainer on several hosts, those of rank 0 first; None where one host has
        room for all ranks, or too few have for a part of them. GraphError where pinned hosts have
        not.
        """
        part = self.needs[party.nodes[0]]
        pinned = [room for name in party.pins for room in rooms if room.host.name == name]
        chosen = pinned or _hosts_of_ranks(part, rooms)
        if not chosen:
            return None
        unit = Unit.of(part.of_ranks(part.ranks // len(chosen)))
        gpus: list[int] = []
        for room in chosen:
            row = room.row(unit)
            if row is None:
                raise GraphError(
                    f"{party.told(1)} is to be spread by place over {', '.join(party.pins)}, which"
                    f" needs {unit} on each of them, but {room.told(unit)}; name other hosts, or"
                    " more of them, or ask for less"
                )
            room.take(unit, row)
            gpus += row
        names = [room.host.name for room in chosen for _ in range(part.ranks // len(chosen))]
        return Seat(names[0], tuple(gpus), tuple(names))

    def _refuse(
        self, node: str, subject: str, unit: Unit, rooms: Iterable[Room], more: str = ""
    ) -> None:
        """subject: who needs it. more: of what is needed. The hosts follow, the roomiest first."""
        sizes = sorted(
            rooms,
            key=lambda room: -(room.host.gpus - len(room.busy) if unit.gpus else room.host.cpus),
        )
        shown = [room.told(unit) for room in sizes[:_SHOWN]]
        shown += [f"{len(sizes) - _SHOWN} more have no more"] if len(sizes) > _SHOWN else []
        self.refusals[node] = (
            f"{subject} needs {unit} on one host{more}, but {', '.join(shown) or 'there is none'};"
            " ask for less, add hosts, or say with place= who goes where"
        )


def _hosts_of_ranks(part: NodeNeeds, rooms: Sequence[Room]) -> list[Room]:
    """The hosts that the ranks of a trainer are spread over, as `divisions` prefers their number;
    none where one host has room for all, or too few have.

    Accelerators are taken host after host, cores where there are fewest processes for each.
    """
    for count in [1, *divisions(part.ranks, len(rooms), part.split)]:
        unit = Unit.of(part.of_ranks(part.ranks // count))
        fitting = [room for room in rooms if room.row(unit) is not None and not room.lacks(unit)]
        if len(fitting) < count:
            continue
        if count == 1:
            return []
        if not unit.gpus:
            fitting.sort(key=lambda room: room.load(unit.processes))
        return [room for room in rooms if any(room is other for other in fitting[:count])]
    return []
