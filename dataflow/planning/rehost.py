"""Where a worker goes whose host is lost, or that joins while a run goes on: a pure function of who
sits where.

It is the rule of the plan (`placing`), one worker at a time: ranks together, in a row of
accelerators of one host that lives; processes on the CPU where there are fewest per core; light
workers beside their neighbours. Who takes turns goes where one of its group is already, which has a
place for all of them. Only the ranks of a trainer that the plan has spread may be on several hosts
again: who reads its weights has them over the network, as they go from several.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from dataflow.planning.gpu_groups import at_once
from dataflow.planning.hosts import Devices
from dataflow.planning.placement import Placement
from dataflow.planning.placing import NodeNeeds, host_beside, spread_rooms, unit_of
from dataflow.planning.plan import Plan
from dataflow.planning.rooms import Room, Unit, rooms_of, settle, shortage


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
