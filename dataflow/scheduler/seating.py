"""Where a worker's next attempt runs, or a newcomer: a host that lives and has room, and which of its accelerators.

A run that names no hosts has one, this machine, whose name is empty.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from dataflow.planning.hosts import Host
from dataflow.scheduler.table import Membership, Table, WorkerRecord

Place: TypeAlias = tuple[str, tuple[int, ...]]
"""A host, and numbers of accelerators over all hosts."""


def seat(table: Table, record: WorkerRecord) -> bool:
    """Give a worker a place for its next attempt: where it was while that host lives; False: it has to wait."""
    host = table.host_of(record)
    if host is None or host.is_alive:
        return host is None or host.is_met
    found = room_for(table, record.worker)
    if found is None:
        return False
    record.host, record.gpus = found
    return True


def homeless(table: Table, now: float) -> list[WorkerRecord]:
    """Those whose next attempt is due, and for which no host has room."""
    if not table.hosts or table.is_ending:
        return []
    return [
        record for record in table
        if record.is_due(now) and not table.hosts[record.host].is_alive and room_for(table, record.worker) is None
    ]  # fmt: skip


def room_for(table: Table, worker: str) -> Place | None:
    """Room for one replica more of a worker; None: there is none until somebody leaves or a host joins."""
    placement = table.plan.placements[worker]
    open_ = [(host, first) for host, first in _machines(table) if _is_open(table, host)]
    if placement.gpus:
        taken = _taken(table, worker)
        for host, first in open_:
            block = spare(range(first, first + host.gpus), taken, placement.ranks)
            if block is not None:
                return host.name, block
        return None
    least = min((host for host, _ in open_), key=lambda host: _load(table, host), default=None)
    return None if least is None else (least.name, ())


def most(table: Table, worker: str) -> int | None:
    """Replicas that the accelerators of all hosts have room for; None: it runs on the CPU."""
    placement = table.plan.placements[worker]
    if not placement.gpus:
        return None
    others = {gpu for each in _beside(table, worker) if each.worker != worker for gpu in each.gpus}
    taken, count = others - set(placement.gpus), 0
    for host, first in _machines(table):
        while (block := spare(range(first, first + host.gpus), taken, placement.ranks)) is not None:
            count, taken = count + 1, taken | set(block)
    return count


def device(table: Table, record: WorkerRecord) -> str:
    """Torch's name of the first device of a worker, on its host."""
    if not record.gpus:
        return "cpu"
    first = next(first for host, first in _machines(table) if host.name == record.host)
    return f"cuda:{record.gpus[0] - first}"


def spare(numbers: range, taken: Collection[int], ranks: int) -> tuple[int, ...] | None:
    """The first accelerators in a row that nobody has, as many as one replica takes; None: there are none."""
    for first in range(numbers.start, numbers.stop - ranks + 1):
        block = tuple(range(first, first + ranks))
        if not set(block) & set(taken):
            return block
    return None


def wanted(table: Table, records: Sequence[WorkerRecord]) -> str:
    """Who needs what, and what there is, for people."""
    names = ", ".join(f"'{record.name}' ({table.plan.placements[record.worker].share})" for record in records)
    hosts = ", ".join(
        f"'{host.name}' has {_free(table, host)}" if _is_open(table, host)
        else f"'{host.name}' {table.hosts[host.name].cause}"
        for host, _ in _machines(table)
    )  # fmt: skip
    return f"no host has room for {names}: {hosts}"


def size(host: Host) -> str:
    """What a host has, for people."""
    gpus = f" and {host.gpus} GPU{'s' if host.gpus > 1 else ''}" if host.gpus else ""
    return f"{host.cpus} core{'s' if host.cpus > 1 else ''}{gpus}"


def _machines(table: Table) -> Iterator[tuple[Host, int]]:
    """The hosts, lost ones included, and the number of the first accelerator of each; those that joined later last."""
    first = 0
    for host in [record.facts for record in table.hosts.values()] or table.plan.devices.machines:
        yield host, first
        first += host.gpus


def _is_open(table: Table, host: Host) -> bool:
    """Whether workers may be started there."""
    record = table.hosts.get(host.name)
    return record is None or (record.is_alive and record.is_met)


def _load(table: Table, host: Host) -> float:
    """Threads for each core, of those that are there."""
    placements = table.plan.placements
    there = [record for record in table if record.host == host.name and record.membership is not Membership.LEFT]
    return sum(placements[record.worker].threads * placements[record.worker].ranks for record in there) / host.cpus


def _free(table: Table, host: Host) -> str:
    first = next(first for each, first in _machines(table) if each.name == host.name)
    taken = {gpu for record in table if record.membership is not Membership.LEFT for gpu in record.gpus}
    return f"{len(set(range(first, first + host.gpus)) - taken)} of {host.gpus} GPUs free"


def _taken(table: Table, worker: str) -> set[int]:
    return {gpu for each in _beside(table, worker) for gpu in each.gpus}


def _beside(table: Table, worker: str) -> list[WorkerRecord]:
    """Those whose accelerators no replica of a worker may have: all but the ones that it takes turns with."""
    in_turn = {each for each in table.plan.turns_of(worker) if each != worker}
    return [each for each in table if each.membership is not Membership.LEFT and each.worker not in in_turn]
