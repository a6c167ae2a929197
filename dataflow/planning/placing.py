"""Which host each replica sits on, with which of its accelerators, when a run is planned: a pure
function.

What must sit together is a unit: the ranks of one replica; all replicas of nodes that take turns on
devices. Pinned units are seated first, then those on accelerators, then those on the CPU, the
largest first (see `settle`). The ranks of a trainer that no host has room for are spread over
several (`spread`), those of others are not: each token would wait for the network in each layer.
Light workers come last, each beside as many of its neighbours as there are on one host; between
equals it is the host of the one that feeds it.

Where a worker goes whose host is lost, or that joins while a run goes on, is the same rule for one
worker at a time, given where the others sit (`rehost`).

Over 600 lines: the start and the time after a loss have one rule.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import networkx as nx

from dataflow.errors import GraphError
from dataflow.planning.gpu_groups import Group, at_once, threads_of
from dataflow.planning.hosts import Devices, Host
from dataflow.planning.inputs import Pins, check_pins, pin_of
from dataflow.planning.placement import Need, Placement, amount
from dataflow.structure import Structure

# What each host has left, and where a unit of processes that must sit together fits: pure
# functions. Units on accelerators fill host after host: an accelerator has one owner, so a full
# host is no overloaded one, and neighbours exchange by memory. Units on the CPU go where there are
# fewest processes per core, as they share the cores.


if TYPE_CHECKING:
    from dataflow.planning.plan import Plan

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


# Over which hosts the ranks of one trainer are spread, where no host has room for all: a pure
# function.


def divisions(
    ranks: int, hosts: int, *, tensor_parallel: int = 1, dp_replicate: int = 1
) -> list[int]:
    """Numbers of hosts, `hosts` at most, that so many ranks can be spread over evenly, what is
    preferred first.

    >>> divisions(16, 8, tensor_parallel=4)
    [2, 4, 8]
    >>> divisions(12, 6, dp_replicate=3)  # 3 copies of 4 ranks: none is cut over 3 hosts or 6
    [3, 6, 2, 4]
    """
    copy = ranks // dp_replicate

    def cost(count: int) -> tuple[bool, bool, int]:
        ranks_each = ranks // count
        return (
            bool(ranks_each % tensor_parallel),
            bool(ranks_each % copy and copy % ranks_each),
            count,
        )

    return sorted((count for count in range(2, hosts + 1) if ranks % count == 0), key=cost)


def spread(
    rooms: Sequence[Room], ranks: int, unit: Callable[[int], Unit], counts: Sequence[int]
) -> list[Room]:
    """The hosts of all ranks, those of rank 0 first; none where there is no room. They are not
    taken yet.

    unit: of so many ranks. counts: numbers of hosts, as `divisions` has them. Accelerators are
    taken host after host, cores where there are fewest processes for each, as all units are
    (`settle`).
    """
    for count in counts:
        part = unit(ranks // count)
        fitting = [
            room for room in rooms if room.row(part) is not None and not room.lacks_memory(part)
        ]
        if len(fitting) >= count:
            if not part.gpus:
                fitting.sort(key=lambda room: (room.processes + part.processes) / room.host.cpus)
            return [
                room for room in rooms if any(room is candidate for candidate in fitting[:count])
            ]
    return []


Found = tuple[Room, tuple[int, ...]]
"""A machine, and accelerators of it."""


@dataclass(frozen=True, kw_only=True)
class NodeNeeds:
    """A node of the graph, before it has a place."""

    replicas: int = 1
    ranks: int = 1
    gpus: int = 0
    """Accelerators of all its replicas; 0: it runs on the CPU."""
    need: Need | None = None
    """Accelerators of each rank."""
    may_spread: bool = False
    """Whether its ranks may be on several hosts."""
    tensor_parallel: int = 1
    dp_replicate: int = 1

    def of_ranks(self, ranks: int) -> NodeNeeds:
        """The needs of so many of its ranks, on a host."""
        return NodeNeeds(ranks=ranks, gpus=ranks if self.gpus else 0, need=self.need)


@dataclass(frozen=True, kw_only=True)
class _Party:
    """Units of one kind."""

    nodes: tuple[str, ...]
    unit: Unit
    count: int = 1
    pins: tuple[str, ...] = ()


def placed(
    graph: Structure,
    parts: Mapping[str, NodeNeeds],
    devices: Devices,
    turns: Sequence[Group],
    pins: Pins,
    neighbours: Mapping[str, Sequence[str]],
) -> dict[str, Placement]:
    """Every node's placement, in the graph's order.

    parts: in the order in which accelerators are numbered. neighbours: of light workers. Raises
    GraphError for units that no host has room for.
    """
    in_turn = {node for group in turns for node in group}
    check_pins(
        pins,
        {node: part.replicas for node, part in parts.items()},
        {
            node: part.ranks
            for node, part in parts.items()
            if part.may_spread and node not in in_turn
        },
    )
    workers = workers_of(graph)
    rooms = rooms_of(devices)
    heavy = {node: part for node, part in parts.items() if not graph.operators[node].light}
    places = _seated(heavy, rooms, turns, pins)
    for worker, mates in neighbours.items():
        nodes = [node for node in graph.operators if workers[node] == worker]
        pin = pin_of(nodes, pins, "they share a worker, as light operators in a row do")
        hosts = [[room.host.name for room, _ in places[mate]] for mate in mates]
        name = host_beside(hosts, rooms) if pin is None else pin
        places |= {node: [(room, ())] for node in nodes for room in rooms if room.host.name == name}
    threads = _threads(graph, heavy, places, rooms, turns)
    return {
        node: _placement(
            graph, node, workers[node], parts[node], places[node], threads, bool(devices.hosts)
        )
        for node in graph.operators
    }


def workers_of(graph: Structure) -> dict[str, str]:
    """By node, its worker: light operators in a row share one, named after the first of them."""
    light: nx.Graph[str] = nx.Graph()
    light.add_nodes_from(name for name, op in graph.operators.items() if op.light)
    for call in graph.calls:
        for stream in call.inputs:
            if stream.node in light and call.operator.name in light:
                light.add_edge(stream.node, call.operator.name)
    workers = {name: name for name in graph.operators}
    for group in nx.connected_components(light):
        first = next(name for name in graph.operators if name in group)
        workers.update(dict.fromkeys(group, first))
    return workers


def neighbours_of(graph: Structure, workers: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """By light worker, the others that exchange rows with it: those that feed it, then those that
    it feeds.
    """
    feeding: dict[str, dict[str, None]] = {}
    fed: dict[str, dict[str, None]] = {}
    for call in graph.calls:
        to = workers[call.operator.name]
        for stream in call.inputs:
            if (sender := workers[stream.node]) != to:
                feeding.setdefault(to, {})[sender] = None
                fed.setdefault(sender, {})[to] = None
    light = dict.fromkeys(worker for node, worker in workers.items() if graph.operators[node].light)
    return {worker: tuple(feeding.get(worker, {}) | fed.get(worker, {})) for worker in light}


def host_beside(neighbours: Iterable[Iterable[str]], rooms: Sequence[Room]) -> str:
    """Where most neighbours have somebody, the first of equals; where there is none, the host of
    the least load.

    neighbours: of each, the hosts of its replicas.
    """
    counts: dict[str, int] = {}
    for hosts in neighbours:
        for host in dict.fromkeys(hosts):
            counts[host] = counts.get(host, 0) + 1
    return (
        max(counts, key=counts.__getitem__)
        if counts
        else min(rooms, key=lambda room: room.load).host.name
    )


def unit_of(parts: Sequence[NodeNeeds]) -> Unit:
    """All replicas of nodes of which one is awake at a time, or a single replica of one node."""
    needs = [part.need.total * part.replicas * part.ranks if part.need else 0 for part in parts]
    gpus = max(part.gpus for part in parts)
    return Unit(
        gpus=gpus,
        processes=max(part.replicas * part.ranks for part in parts),
        cores=max(part.ranks for part in parts),
        memory_bytes=max(needs),
        gpu_memory_bytes=max(needs) // gpus if gpus else 0,
    )


def _seated(
    parts: Mapping[str, NodeNeeds], rooms: Sequence[Room], turns: Sequence[Group], pins: Pins
) -> dict[str, list[Found]]:
    """By node, where each of its replicas is."""
    parties: list[_Party] = []
    for node, part in parts.items():
        if (group := next((group for group in turns if node in group), None)) is None:
            unit = unit_of([part.of_ranks(part.ranks)])
            parties.append(
                _Party(nodes=(node,), unit=unit, count=part.replicas, pins=pins.get(node, ()))
            )
        elif not any(group == party.nodes for party in parties):
            pin = pin_of(group, pins, "they take turns on the same devices")
            own = (pin,) if pin is not None else ()
            parties.append(
                _Party(nodes=group, unit=unit_of([parts[name] for name in group]), pins=own)
            )
    if len(rooms) > 1:
        parties.sort(
            key=lambda party: (
                not party.pins,
                not party.unit.gpus,
                -(party.unit.gpus or party.unit.cores),
            )
        )
    places: dict[str, list[Found]] = {}
    for party in parties:
        part = parts[party.nodes[0]]
        is_spread = part.may_spread and len(party.nodes) == 1 and part.ranks > 1
        if is_spread and (len(party.pins) > 1 or not party.pins):
            rows = _spread_ranks(party, part, rooms)
            if rows:
                places[party.nodes[0]] = rows
                continue
        rows = _pinned(party, rooms) if party.pins else settle(rooms, party.unit, party.count)
        if len(rows) < party.count:
            raise GraphError(
                _too_large(party, len(rows), rooms, may_spread=is_spread and len(rooms) > 1)
            )
        for node in party.nodes:
            places[node] = rows if len(party.nodes) == 1 else _dealt(rows[0], parts[node])
    return places


def _dealt(whole: Found, part: NodeNeeds) -> list[Found]:
    """The devices of each replica, of those that nodes share."""
    room, gpus = whole
    return [
        (room, gpus[number * part.ranks : (number + 1) * part.ranks])
        for number in range(part.replicas)
    ]


def _pinned(party: _Party, rooms: Sequence[Room]) -> list[Found]:
    """One after the other on the hosts in turn. GraphError where there is no room."""
    by_name = {room.host.name: room for room in rooms}
    rows: list[Found] = []
    for number in range(party.count):
        room = by_name[party.pins[number % len(party.pins)]]
        row = room.row(party.unit)
        if row is None:
            raise GraphError(
                f"{_told(party)} needs {party.unit} on host '{room.host.name}', where place puts"
                f" it, but {room.told(party.unit)}; name another host, or ask for less"
            )
        room.take(party.unit, row)
        rows.append((room, row))
    return rows


def _spread_ranks(party: _Party, part: NodeNeeds, rooms: Sequence[Room]) -> list[Found]:
    """What each host has of the ranks of a trainer; nothing where one host has room for all, or too
    few have. GraphError where pinned hosts have not.
    """

    def unit(ranks: int) -> Unit:
        return unit_of([part.of_ranks(ranks)])

    chosen = [room for name in party.pins for room in rooms if room.host.name == name]
    if not party.pins:
        chosen = spread_rooms(rooms, part)
    share = unit(part.ranks // max(1, len(chosen)))
    rows: list[Found] = []
    for room in chosen:
        row = room.row(share)
        if row is None:
            raise GraphError(
                f"{_told(party)} is to be spread by place over {', '.join(party.pins)}, which needs"
                f" {share} on each of them, but {room.told(share)}; name other hosts, or more of"
                " them, or ask for less"
            )
        room.take(share, row)
        rows.append((room, row))
    return rows


def spread_rooms(rooms: Sequence[Room], part: NodeNeeds) -> list[Room]:
    """The hosts that the ranks of a trainer are spread over; none where one host has room for all,
    or too few have.
    """
    whole = unit_of([part.of_ranks(part.ranks)])
    if any(room.row(whole) is not None and not room.lacks_memory(whole) for room in rooms):
        return []
    counts = divisions(
        part.ranks, len(rooms), tensor_parallel=part.tensor_parallel, dp_replicate=part.dp_replicate
    )
    return spread(rooms, part.ranks, lambda ranks: unit_of([part.of_ranks(ranks)]), counts)


def _too_large(party: _Party, count: int, rooms: Sequence[Room], *, may_spread: bool) -> str:
    """The refusal of units that found no place."""
    found_some = f", of {party.count} that are asked for {count} found one" if count else ""
    spread = ", or an equal part of that on each of several" if may_spread else ""
    return (
        f"{_told(party)} needs {party.unit} on one host{spread}{found_some}, but"
        f" {shortage(rooms, party.unit)}; ask for less, add hosts, or say with place= who goes"
        " where"
    )


def _told(party: _Party) -> str:
    if len(party.nodes) > 1:
        return (
            f"the group of {', '.join(map(repr, party.nodes[:-1]))} and '{party.nodes[-1]}', which"
            " take turns,"
        )
    return f"each replica of '{party.nodes[0]}'" if party.count > 1 else f"'{party.nodes[0]}'"


def _threads(
    graph: Structure,
    heavy: Mapping[str, NodeNeeds],
    places: Mapping[str, Sequence[Found]],
    rooms: Sequence[Room],
    turns: Sequence[Group],
) -> dict[str, int]:
    """By machine, the threads of each process that computes there."""
    counts: dict[str, dict[str, tuple[int, int]]] = {room.host.name: {} for room in rooms}
    for node, part in heavy.items():
        if not part.gpus and graph.operators[node].computes:
            for room, _ in places[node]:
                of_host = counts[room.host.name]
                ranks = part.ranks * part.replicas // len(places[node])
                of_host[node] = of_host.get(node, (0, ranks))[0] + 1, ranks
    synchronous = all(feedback.max_staleness == 0 for feedback in graph.feedbacks)
    return {
        room.host.name: threads_of(
            turns, counts[room.host.name], room.host.cpus, synchronous=synchronous
        )
        for room in rooms
    }


def _placement(
    graph: Structure,
    node: str,
    worker: str,
    part: NodeNeeds,
    places: Sequence[Found],
    threads: Mapping[str, int],
    named: bool,
) -> Placement:
    operator = graph.operators[node]
    is_spread = len(places) > part.replicas
    threads_each = [1 if operator.light else threads[room.host.name] for room, _ in places]
    gpus = tuple(gpu for _, row in places for gpu in row)
    by_rank = (
        [place for place in places for _ in range(part.ranks // len(places))]
        if is_spread
        else places
    )
    return Placement(
        node=node,
        worker=worker,
        replicas=part.replicas,
        ranks=part.ranks,
        gpus=gpus,
        hosts=tuple(room.host.name for room, _ in places[: part.replicas]) if named else (),
        rank_hosts=tuple(room.host.name for room, _ in by_rank) if is_spread else (),
        first_gpus=tuple(room.first_gpu for room, _ in by_rank) if named and gpus else (),
        dp_replicate=operator.traits.dp_replicate,
        tensor_parallel=operator.traits.tensor_parallel,
        threads=min(threads_each),
        threads_there=tuple(threads_each)
        if min(threads_each) < max(threads_each) and not is_spread
        else (),
        need=part.need,
        port=operator.traits.port,
    )


# Where a worker goes whose host is lost, or that joins while a run goes on: a pure function of who
# sits where. It is the rule of the plan (`placing`), one worker at a time: ranks together, in a
# row of accelerators of one host that lives; processes on the CPU where there are fewest per core;
# light workers beside their neighbours. Who takes turns goes where one of its group is already,
# which has a place for all of them. Only the ranks of a trainer that the plan has spread may be on
# several hosts again: who reads its weights has them over the network, as they go from several.


class Sits(Protocol):
    """A worker and its place."""

    @property
    def worker(self) -> str:
        """As the plan calls it and its replicas."""

    @property
    def replica(self) -> int:
        """Its number; those that the plan has not are newcomers."""

    @property
    def host(self) -> str:
        """Where it sits; empty: this machine, where there is no other."""

    @property
    def rank_hosts(self) -> tuple[str, ...]:
        """Where each of its ranks sits, where these are spread; else nothing."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """Its accelerators, numbered over all hosts."""


def rehost(
    plan: Plan,
    devices: Devices,
    alive: Collection[str],
    seated: Iterable[Sits],
    worker: str,
    replica: int,
) -> tuple[str, tuple[int, ...]] | str:
    """The host and the accelerators (numbered over all hosts) of one replica; else what it needs
    and what there is.

    devices: those of the plan, and hosts that joined since behind them. alive: names of hosts that
    may be used. seated: all other workers that have a place, those on lost hosts too.

    >>> from dataflow import Devices, Graph, plan
    >>> from dataflow.planning.hosts import Host
    >>> from dataflow.testing import FakePrompts, FakeTrainer
    >>> g = Graph("tiny")
    >>> FakeTrainer(prompts_per_step=2)(g.source(FakePrompts()))
    >>> made = plan(g, Devices.of([Host(name="a", cpus=4), Host(name="b", cpus=4)]))
    >>> made.host("trainer", 0), rehost(made, made.devices, {"b"}, [], "trainer", 0)
    ('a', ('b', ()))
    """
    seated = [seat for seat in seated if seat.host in alive]
    rooms = _rooms(plan, devices, alive, seated)
    if not rooms:
        return _nowhere(worker, replica)
    if worker in plan.neighbours:
        hosts = {
            neighbour: [seat.host for seat in seated if seat.worker == neighbour]
            for neighbour in plan.neighbours[worker]
        }
        return host_beside(hosts.values(), rooms), ()
    group = plan.turns_of(worker)
    port = plan.placements[worker].port
    if port:
        hosts_of_port = {seat.host for seat in seated if plan.placements[seat.worker].port == port}
        rooms = [room for room in rooms if room.host.name not in hosts_of_port]
        if not rooms:
            return (
                f"'{worker}-{replica}' listens on port {port}, which another worker has on each"
                " host that is left; add a host, or begin again with port=0"
            )
    mates = [seat for seat in seated if seat.worker in group]
    if mates:
        return _beside_mates(plan, rooms, mates, worker, replica)
    unit = unit_of(
        [_part(plan.placements[node]) for node in group]
        or [_part(plan.placements[worker], replicas=1)]
    )
    places = settle(_roomy(rooms, unit), unit)
    if not places:
        return _refusal(worker, replica, unit, rooms)
    room, row = places[0]
    return room.host.name, _share(plan, worker, replica, row[0]) if group and row else row


def rehost_ranks(
    plan: Plan, devices: Devices, alive: Collection[str], seated: Iterable[Sits], worker: str
) -> tuple[tuple[str, ...], tuple[int, ...]] | str:
    """The host and the accelerator of each rank of a trainer that the plan has spread; else what it
    needs and what there is. All are on one host where one has room for them now. The rest is as for
    `rehost`.
    """
    rooms = _rooms(plan, devices, alive, [seat for seat in seated if seat.host in alive])
    if not rooms:
        return _nowhere(worker, 0)
    part = _part(plan.placements[worker])
    unit = unit_of([part])
    places = settle(_roomy(rooms, unit), unit)
    if places:
        room, row = places[0]
        return (room.host.name,) * part.ranks, row
    chosen = spread_rooms(rooms, part)
    if not chosen:
        return _refusal(worker, 0, unit, rooms)
    share = unit_of([part.of_ranks(part.ranks // len(chosen))])
    rows = [room.row(share) or () for room in chosen]
    hosts = [room.host.name for room in chosen for _ in range(part.ranks // len(chosen))]
    return tuple(hosts), tuple(gpu for row in rows for gpu in row)


def most_replicas(
    plan: Plan, devices: Devices, alive: Collection[str], seated: Iterable[Sits], worker: str
) -> int | None:
    """How many replicas of a worker accelerators have room for beside the others; None: it runs on
    the CPU.
    """
    placement = plan.placements[worker]
    if not placement.gpus:
        return None
    in_turn = plan.turns_of(worker)
    apart = [seat for seat in seated if seat.worker != worker and seat.worker not in in_turn]
    homes = {seat.host for seat in seated if seat.worker in in_turn}
    rooms = [
        room for room in _rooms(plan, devices, alive, apart) if not homes or room.host.name in homes
    ]
    unit = unit_of([_part(placement, replicas=1)])
    return len(settle(_roomy(rooms, unit), unit, devices.gpus))


def _part(placement: Placement, replicas: int | None = None) -> NodeNeeds:
    """replicas: of so many; None: of all."""
    count = placement.replicas if replicas is None else replicas
    gpus = count * placement.ranks if placement.gpus else 0
    return NodeNeeds(
        replicas=count,
        ranks=placement.ranks,
        gpus=gpus,
        need=placement.need,
        tensor_parallel=placement.tensor_parallel,
        dp_replicate=placement.dp_replicate,
    )


def _roomy(rooms: Iterable[Room], unit: Unit) -> list[Room]:
    """Hosts on which memory is not known to run out; this machine alone is taken as it is."""
    return [room for room in rooms if not room.host.name or not room.lacks_memory(unit)]


def _rooms(
    plan: Plan, devices: Devices, alive: Collection[str], seated: Sequence[Sits]
) -> list[Room]:
    """Hosts that live, with what those have who sit there."""
    rooms = {room.host.name: room for room in rooms_of(devices) if room.host.name in alive}
    counts: dict[str, dict[str, int]] = {}
    for seat in seated:
        if seat.worker in plan.neighbours:
            continue
        ranks = plan.placements[seat.worker].ranks
        for host in seat.rank_hosts or (seat.host,) * ranks:
            if host in rooms:
                of_host = counts.setdefault(host, {})
                of_host[seat.worker] = of_host.get(seat.worker, 0) + 1
        for host in {seat.host, *seat.rank_hosts}.intersection(rooms):
            rooms[host].busy.update(set(_block(plan, seat)).intersection(rooms[host].numbers))
    for host, processes in counts.items():
        placements = {worker: plan.placements[worker] for worker in processes}
        rooms[host].processes = at_once(plan.turns, processes)
        rooms[host].memory_bytes = at_once(plan.turns, _memory(placements, processes))
    return list(rooms.values())


def _memory(placements: Mapping[str, Placement], processes: Mapping[str, int]) -> dict[str, int]:
    """Of main memory, as far as it is known."""
    return {
        worker: (placements[worker].memory_bytes or 0) * count
        for worker, count in processes.items()
        if not placements[worker].gpus
    }


def _block(plan: Plan, seated: Sits) -> Iterable[int]:
    """The accelerators that others cannot have while the worker sits there: its own, or those of
    its whole group.
    """
    group = plan.turns_of(seated.worker)
    if not group or not seated.gpus or seated.replica >= plan.placements[seated.worker].replicas:
        return seated.gpus
    first = _first(plan, seated)
    return range(first, first + max(len(plan.placements[node].gpus) for node in group))


def _first(plan: Plan, seated: Sits) -> int:
    """The first accelerator of a group's."""
    placement = plan.placements[seated.worker]
    return seated.gpus[0] - (placement.gpus_of(seated.replica)[0] - placement.gpus[0])


def _share(plan: Plan, worker: str, replica: int, first: int) -> tuple[int, ...]:
    """The accelerators of one replica among those that its group shares."""
    placement = plan.placements[worker]
    return tuple(first + gpu - placement.gpus[0] for gpu in placement.gpus_of(replica))


def _beside_mates(
    plan: Plan, rooms: Sequence[Room], mates: Sequence[Sits], worker: str, replica: int
) -> tuple[str, tuple[int, ...]] | str:
    """The place of a worker whose group has one."""
    placement, host = plan.placements[worker], mates[0].host
    if not placement.gpus:
        return host, ()
    planned = [mate for mate in mates if mate.replica < plan.placements[mate.worker].replicas]
    if replica < placement.replicas and planned:
        return host, _share(plan, worker, replica, _first(plan, planned[0]))
    room = next(room for room in rooms if room.host.name == host)
    room.busy -= {gpu for mate in mates for gpu in _block(plan, mate)}
    room.busy |= {gpu for mate in mates if mate.worker == worker for gpu in mate.gpus}
    row = room.row(Unit(gpus=placement.ranks))
    return (
        _refusal(worker, replica, Unit(gpus=placement.ranks), [room])
        if row is None
        else (host, row)
    )


def _nowhere(worker: str, replica: int) -> str:
    return f"'{worker}-{replica}' has no host left; add one"


def _refusal(worker: str, replica: int, unit: Unit, rooms: Sequence[Room]) -> str:
    return (
        f"'{worker}-{replica}' needs {unit} on one host, but {shortage(rooms, unit)}; add a host,"
        " or make room"
    )
