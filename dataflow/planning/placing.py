"""Which host each replica sits on, with which of its accelerators, when a run is planned: a pure
function.

What must sit together is a unit: the ranks of one replica; all replicas of nodes that take turns on
devices. Pinned units are seated first, then those on accelerators, then those on the CPU, the
largest first (`rooms` says where). The ranks of a trainer that no host has room for are spread over
several (`spreading`), those of others are not: each token would wait for the network in each layer.
Light workers come last, each beside as many of its neighbours as there are on one host; between
equals it is the host of the one that feeds it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from dataflow.errors import GraphError
from dataflow.planning.gpu_groups import Group, threads_of
from dataflow.planning.hosts import Devices
from dataflow.planning.pins import Pins, check_pins, pin_of
from dataflow.planning.placement import Need, Placement
from dataflow.planning.rooms import Room, Unit, rooms_of, settle, shortage
from dataflow.structure import Structure

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
    (`rooms`).
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

    def of_ranks(self, ranks: int) -> "NodeNeeds":
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
            rows = _spread(party, part, rooms)
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


def _spread(party: _Party, part: NodeNeeds, rooms: Sequence[Room]) -> list[Found]:
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
