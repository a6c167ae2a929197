"""Where a worker's next attempt runs, or a newcomer: a host that lives and has room, and which of
its accelerators.

A run that names no hosts has one, this machine, whose name is empty.
"""

from collections.abc import Collection, Iterable

from dataflow.planning.hosts import Devices, Host
from dataflow.planning.seats import Fixed, Replica, Seat
from dataflow.scheduler.table import Membership, ProcessState, Table, WorkerRecord


def seat(table: Table, records: Iterable[WorkerRecord]) -> list[WorkerRecord]:
    """Those of some workers that have a place for their next attempt: where the plan has them, or
    where they were, while that host lives, else where they are put now. The others have to wait.
    """
    due = list(records)
    for record in due:
        if may_go_home(table, record, _open(table)) and not _mates_stay(
            table, record, _home(table, record).host
        ):
            record.host, record.gpus, record.rank_hosts = _home(table, record)
    seats, _ = _seats(table, due)
    for record in due:
        if moved := seats.get((record.worker, record.replica)):
            record.host, record.gpus, rank_hosts = moved
            record.rank_hosts = rank_hosts or (record.host,) * len(record.rank_hosts)
    return [
        record
        for record in due
        if not _is_homeless(table, record) and all(host.is_met for host in table.hosts_of(record))
    ]


def no_room(table: Table, now: float) -> str:
    """What workers need whose next attempt is due, and for which no host has room, and what there
    is, as text; empty: each has room.
    """
    if not table.hosts or table.is_ending:
        return ""
    due = [record for record in table if record.is_due(now) and _is_homeless(table, record)]
    seats, refusals = _seats(table, due)
    waiting = [record for record in due if (record.worker, record.replica) not in seats]
    lost = [f"'{host.name}' {host.cause}" for host in table.hosts.values() if not host.is_alive]
    bound = [
        f"'{record.name}' keeps on host '{record.host}' what no other sees"
        for record in waiting
        if is_bound(table, record)
    ]
    if bound:
        return f"{'; '.join(bound)}, and nothing else can go on with that: {', '.join(lost)}"
    if not waiting:
        return ""
    names = ", ".join(f"'{record.name}'" for record in waiting)
    needed = [refusal.partition("; ")[0] for refusal in refusals.values()]
    return f"no host has room for {names}: {'; '.join([*needed, *lost])}"


def room_for(table: Table, worker: str) -> Seat | None:
    """Room for a newcomer; None: there is none until somebody leaves or a host joins."""
    newcomer = worker, 1 + max(record.replica for record in table if record.worker == worker)
    return _settled(table, [newcomer], _open(table))[0].get(newcomer)


def most(table: Table, worker: str) -> int | None:
    """Replicas that the accelerators of all hosts have room for; None: it runs on the CPU."""
    if not table.plan.placements[worker].gpus:
        return None
    devices = _devices(table)
    numbers = {record.replica for record in table if record.worker == worker}
    replicas = [(worker, number) for number in sorted(numbers.union(range(devices.gpus)))]
    return len(_settled(table, replicas, None)[0])


def _seats(
    table: Table, records: Iterable[WorkerRecord]
) -> tuple[dict[Replica, Seat], dict[str, str]]:
    """Seats for those of some workers that cannot stay where they are."""
    replicas = [
        (record.worker, record.replica)
        for record in records
        if _is_homeless(table, record) and not is_bound(table, record)
    ]
    return _settled(table, replicas, _open(table)) if replicas else ({}, {})


def _settled(
    table: Table, wanted: Collection[Replica], hosts: Collection[str] | None
) -> tuple[dict[Replica, Seat], dict[str, str]]:
    """Seats for some replicas, while all others stay where they are."""
    plan = table.plan
    private = {host.name for host in table.hosts.values() if host.facts.own_folder}
    fixed = Fixed(
        seats={
            (record.worker, record.replica): Seat(record.host, record.gpus, record.rank_hosts)
            for record in table
            if record.membership is not Membership.LEFT
            and (record.worker, record.replica) not in wanted
        },
        hosts=hosts,
        barred={worker: private for worker, nodes in plan.workers.items() if _keeps(table, nodes)},
    )
    return plan.settle(_devices(table), wanted, fixed)


def _home(table: Table, record: WorkerRecord) -> Seat:
    """The planned place."""
    placement = table.plan.placements[record.nodes[0]]
    return Seat(
        placement.host(record.replica), placement.gpus_of(record.replica), placement.rank_hosts
    )


def _is_homeless(table: Table, record: WorkerRecord) -> bool:
    """Whether a worker cannot start where it is: hosts are lost, or workers that it takes turns
    with are elsewhere.
    """
    is_lost = not all(host.is_alive for host in table.hosts_of(record))
    return is_lost or _mates_stay(table, record, record.host)


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
    apart = [
        mate
        for mate in table
        if mate is not record
        and mate.worker not in group
        and mate.membership is not Membership.LEFT
    ]
    ports = [table.plan.placements[mate.nodes[0]].port for mate in apart if mate.host == host]
    gpus_taken = {gpu for mate in apart for gpu in mate.gpus}
    return not gpus_taken.intersection(gpus) and (not planned.port or planned.port not in ports)


def _mates_stay(table: Table, record: WorkerRecord, host: str) -> bool:
    """Whether some of the workers that take turns with it are elsewhere than on a host, and stay
    there.
    """
    group = table.plan.turns_of(record.worker)
    return any(
        mate.worker in group
        and mate is not record
        and mate.host != host
        and mate.process not in (ProcessState.DOWN, ProcessState.DYING, ProcessState.GONE)
        for mate in (table if group else ())
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


def device(table: Table, record: WorkerRecord) -> str:
    """Torch's name of the first device of a worker, on its host."""
    return _name(_devices(table), record.gpus[0]) if record.gpus else "cpu"


def rank_devices(table: Table, record: WorkerRecord) -> list[str]:
    """Of a worker whose ranks are spread, torch's name of the device of each, on its host."""
    devices = _devices(table)
    return [_name(devices, gpu) for gpu in record.gpus] or ["cpu"] * len(record.rank_hosts)


def _name(devices: Devices, gpu: int) -> str:
    return f"cuda:{devices.number_there(gpu)}"


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
