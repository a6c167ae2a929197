"""The placements of a plan: every replica's seat (`seats`), as a run begins with them."""

from collections.abc import Mapping, Sequence

import networkx as nx

from dataflow.errors import GraphError
from dataflow.node import Operator
from dataflow.planning.gpu_groups import Group, threads_of
from dataflow.planning.hosts import Devices
from dataflow.planning.inputs import Pins, check_pins, pin_of
from dataflow.planning.placement import Placement
from dataflow.planning.seats import Fixed, NodeNeeds, Replica, Seat, settle
from dataflow.structure import Structure


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
    heavy = {node: part for node, part in parts.items() if workers[node] not in neighbours}
    together = [(group, "they take turns on the same devices") for group in turns]
    for worker in neighbours:
        nodes = tuple(node for node in graph.operators if workers[node] == worker)
        together.append((nodes, "they share a worker, as light operators in a row do"))
    pinned = dict(pins)
    for nodes, why in together:
        if (pin := pin_of(nodes, pins, why)) is not None:
            pinned[nodes[0]] = (pin,)
    replicas = [(node, number) for node, part in heavy.items() for number in range(part.replicas)]
    replicas += [(worker, 0) for worker in neighbours]
    seats, refusals = settle(
        heavy, devices, turns, neighbours, replicas, Fixed(pins=pinned), may_lack=True
    )
    if refusals:
        raise GraphError(next(iter(refusals.values())))
    threads = _threads(graph, heavy, seats, devices, turns)
    return {
        node: _placement(graph.operators[node], workers[node], part, seats, threads, devices)
        for node, part in ((node, parts[node]) for node in graph.operators)
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


def _threads(
    graph: Structure,
    heavy: Mapping[str, NodeNeeds],
    seats: Mapping[Replica, Seat],
    devices: Devices,
    turns: Sequence[Group],
) -> dict[str, int]:
    """By machine, the threads of each process that computes there."""
    counts: dict[str, dict[str, tuple[int, int]]] = {host.name: {} for host in devices.machines}
    for (node, _), seat in seats.items():
        part = heavy.get(node)
        if part is not None and not part.gpus and graph.operators[node].computes:
            for host, ranks in seat.ranks(part.ranks).items():
                replicas, _ = counts[host].get(node, (0, ranks))
                counts[host][node] = replicas + 1, ranks
    synchronous = all(feedback.max_staleness == 0 for feedback in graph.feedbacks)
    return {
        host.name: threads_of(turns, counts[host.name], host.cpus, synchronous=synchronous)
        for host in devices.machines
    }


def _placement(
    operator: Operator,
    worker: str,
    part: NodeNeeds,
    seats: Mapping[Replica, Seat],
    threads: Mapping[str, int],
    devices: Devices,
) -> Placement:
    own = [seats[worker, number] for number in range(part.replicas)]
    gpus, rank_hosts = tuple(gpu for seat in own for gpu in seat.gpus), own[0].rank_hosts
    hosts = rank_hosts or tuple(seat.host for seat in own)
    threads_each = [1 if operator.light else threads[host] for host in hosts]
    first_gpus = {
        host.name: first for host, first in zip(devices.machines, devices.first_gpus, strict=True)
    }
    is_uneven = min(threads_each) < max(threads_each) and not rank_hosts
    return Placement(
        node=operator.name,
        worker=worker,
        replicas=part.replicas,
        ranks=part.ranks,
        gpus=gpus,
        hosts=hosts[: part.replicas] if devices.hosts else (),
        rank_hosts=rank_hosts,
        first_gpus=tuple(first_gpus[host] for host in hosts) if devices.hosts and gpus else (),
        split=part.split,
        threads=min(threads_each),
        threads_there=tuple(threads_each) if is_uneven else (),
        need=part.need,
        port=part.port,
        chosen=part.chosen,
        arrives_in_host=part.arrives_in_host,
    )


def needs_of(placement: Placement) -> NodeNeeds:
    """The needs of a node that was planned. Ranks that the plan has on one host stay together, as
    who reads the weights expects them from there.
    """
    return NodeNeeds(
        replicas=placement.replicas,
        ranks=placement.ranks,
        gpus=len(placement.gpus),
        need=placement.need,
        may_spread=bool(placement.rank_hosts),
        split=placement.split,
        port=placement.port,
        chosen=placement.chosen,
        arrives_in_host=placement.arrives_in_host,
    )
