"""Where a worker's next attempt runs, or a newcomer: a host that lives and has room, and which of
its accelerators.

A run that names no hosts has one, this machine, whose name is empty.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from dataflow.planning.hosts import Devices, Host
from dataflow.planning.placing import most_replicas, rehost, rehost_ranks, rooms_of
from dataflow.scheduler.table import Life, Membership, Table, WorkerRecord

Place: TypeAlias = tuple[str, tuple[int, ...]]
"""A host, and numbers of accelerators over all hosts."""


def seat(table: Table, records: Iterable[WorkerRecord]) -> list[WorkerRecord]:
    """Those of some workers that have a place for their next attempt: where the plan has them, or
    where they were, while that host lives, else where they are put now. The others have to wait.
    """
    seated: list[WorkerRecord] = []
    full: set[str] = set()
    for record in records:
        if may_go_home(table, record, _open(table)) and not _mates_stay(table, record):
            record.host, record.gpus, record.rank_hosts = _home(table, record)
        hosts = table.hosts_of(record)
        if all(host.is_alive for host in hosts):
            seated += [record] if all(host.is_met for host in hosts) else []
        elif record.worker not in full:  # where one replica has no room, no other has
            if _move(table, record):
                seated.append(record)
            else:
                full.add(record.worker)
    return seated


def homeless(table: Table, now: float) -> list[WorkerRecord]:
    """Workers whose next attempt is due, and for which no host has room."""
    if not table.hosts or table.is_ending:
        return []
    waiting = [
        record
        for record in table
        if record.is_due(now) and not all(host.is_alive for host in table.hosts_of(record))
    ]
    one_each = {record.worker: record for record in waiting}
    full = {
        worker for worker, record in one_each.items() if not _move(table, record, only_look=True)
    }
    return [record for record in waiting if record.worker in full]


def room_for(table: Table, worker: str, replica: int | None = None) -> Place | None:
    """Room for a replica of a worker; None: there is none until somebody leaves or a host joins.

    replica: of one that has no place; None: a newcomer.
    """
    if replica is None:
        replica = 1 + max(record.replica for record in table if record.worker == worker)
    seated = [
        record for record in _seated(table) if (record.worker, record.replica) != (worker, replica)
    ]
    open_ = _sees_home(table) if _keeps(table, table.plan.workers[worker]) else _open(table)
    place = rehost(table.plan, _devices(table), open_, seated, worker, replica)
    return None if isinstance(place, str) else place


def _move(table: Table, record: WorkerRecord, *, only_look: bool = False) -> bool:
    """Give a worker another place; whether there is one. only_look: leave it where it is."""
    if is_bound(table, record):
        return False
    if not record.rank_hosts:
        place = room_for(table, record.worker, record.replica)
        if place is not None and not only_look:
            record.host, record.gpus = place
        return place is not None
    seated = [mate for mate in _seated(table) if mate is not record]
    spread = rehost_ranks(table.plan, _devices(table), _sees_home(table), seated, record.worker)
    if isinstance(spread, str):
        return False
    if not only_look:
        record.rank_hosts, record.gpus = spread
        record.host = record.rank_hosts[0]
    return True


def _home(table: Table, record: WorkerRecord) -> tuple[str, tuple[int, ...], tuple[str, ...]]:
    """The planned place: host, accelerators, hosts of its ranks."""
    placement = table.plan.placements[record.nodes[0]]
    return placement.host(record.replica), placement.gpus_of(record.replica), placement.rank_hosts


def may_go_home(table: Table, record: WorkerRecord, hosts: set[str]) -> bool:
    """Whether a worker is elsewhere than the plan has it, and may be there again: those hosts are
    among these, and what it needs there is free, but for those that it takes turns with, which go
    as well.
    """
    if not table.hosts or is_bound(table, record):
        return False
    planned = table.plan.placements[record.nodes[0]]
    if record.replica >= planned.replicas:
        return False
    host, gpus, rank_hosts = home = _home(table, record)
    if home == (record.host, record.gpus, record.rank_hosts) or not {
        host,
        *rank_hosts,
    } <= hosts & _open(table):
        return False
    group = table.plan.turns_of(record.worker)
    apart = [seat for seat in _seated(table) if seat is not record and seat.worker not in group]
    ports = [table.plan.placements[seat.nodes[0]].port for seat in apart if seat.host == host]
    gpus_taken = {gpu for seat in apart for gpu in seat.gpus}
    return not gpus_taken.intersection(gpus) and (not planned.port or planned.port not in ports)


def _mates_stay(table: Table, record: WorkerRecord) -> bool:
    """Whether some of the workers that take turns with it are elsewhere than planned, and stay
    there.
    """
    mates = [
        mate
        for mate in table
        if mate.worker in table.plan.turns_of(record.worker) and mate is not record
    ]
    return any(
        mate.life not in (Life.DOWN, Life.DYING) and mate.host != _home(table, mate)[0]
        for mate in mates
    )


def is_bound(table: Table, record: WorkerRecord) -> bool:
    """Whether what a worker keeps is on its host alone, whose folder no other sees: it goes on
    nowhere else.
    """
    host = table.hosts.get(record.host)
    return host is not None and host.facts.own_folder and _keeps(table, record.nodes)


def _keeps(table: Table, nodes: Iterable[str]) -> bool:
    """Whether it keeps what nobody could make again: checkpoints, or what has come of an
    evaluation. Who takes turns with one that does is where that is.
    """
    both = {mate for node in nodes for mate in (node, *table.plan.turns_of(node))}
    return any(table.graph.operators[node].kind == "sink" for node in both)


def most(table: Table, worker: str) -> int | None:
    """Replicas that the accelerators of all hosts have room for; None: it runs on the CPU."""
    devices = _devices(table)
    return most_replicas(
        table.plan, devices, {host.name for host in devices.machines}, _seated(table), worker
    )


def device(table: Table, record: WorkerRecord) -> str:
    """Torch's name of the first device of a worker, on its host."""
    return _name(_devices(table), record.gpus[0]) if record.gpus else "cpu"


def rank_devices(table: Table, record: WorkerRecord) -> list[str]:
    """Of a worker whose ranks are spread, torch's name of the device of each, on its host."""
    devices = _devices(table)
    return [_name(devices, gpu) for gpu in record.gpus] or ["cpu"] * len(record.rank_hosts)


def _name(devices: Devices, gpu: int) -> str:
    return f"cuda:{devices.number_there(gpu)}"


def wanted(table: Table, records: Sequence[WorkerRecord]) -> str:
    """What each worker needs, and what there is, as text."""
    names = ", ".join(
        f"'{record.name}' ({table.plan.placements[record.worker].share})" for record in records
    )
    open_, gpus_taken = _open(table), {gpu for record in _seated(table) for gpu in record.gpus}
    hosts = ", ".join(
        (
            f"'{room.host.name}' has {room.host.gpus - len(gpus_taken.intersection(room.numbers))}"
            " of"
            f" {room.host.gpus} GPUs free"
            if room.host.name in open_
            else f"'{room.host.name}' {table.hosts[room.host.name].cause}"
        )
        for room in rooms_of(_devices(table))
    )
    if bound := [record for record in records if is_bound(table, record)]:
        where = "; ".join(
            f"'{record.name}' keeps on host '{record.host}' what no other sees" for record in bound
        )
        return f"{where}, and nothing else can go on with that: {hosts}"
    return f"no host has room for {names}: {hosts}"


def size(host: Host) -> str:
    """What a host has, as text."""
    gpus = f" and {host.gpus} GPU{'s' if host.gpus > 1 else ''}" if host.gpus else ""
    return f"{host.cpus} core{'s' if host.cpus > 1 else ''}{gpus}"


def _devices(table: Table) -> Devices:
    """The hosts, lost ones included; those that joined later last."""
    hosts, planned = tuple(record.facts for record in table.hosts.values()), table.plan.devices
    return planned if hosts == planned.hosts else Devices.of(hosts)


def _open(table: Table) -> set[str]:
    """Names of the hosts on which workers may be started."""
    return (
        {host.name for host in table.hosts.values() if host.is_alive and host.is_met}
        if table.hosts
        else {""}
    )


def _sees_home(table: Table) -> set[str]:
    """The names of open hosts that see the scheduler's folder."""
    return {
        name
        for name in _open(table)
        if name not in table.hosts or not table.hosts[name].facts.own_folder
    }


def _seated(table: Table) -> list[WorkerRecord]:
    return [record for record in table if record.membership is not Membership.LEFT]
