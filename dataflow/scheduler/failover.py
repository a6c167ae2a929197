"""A scheduler takes the place of one that has died, or was replaced: a policy over the table that
this one has left.

Whoever was at work stays so, and hears again what it may have missed. Whoever was not, because it
was starting, or had died, or died meanwhile, has fallen, and is started again like any other.
"""

import signal
from collections.abc import Mapping, Sequence

from dataflow.scheduler import lifecycle, recovery, scaling
from dataflow.scheduler.events import Command, FaultNoticed, KeptProcess, Outlive, Send, Signal
from dataflow.scheduler.swaps import knob_policy
from dataflow.scheduler.table import Life, Table, WorkerRecord
from dataflow.worker.messages import Start


def take_over(table: Table, processes: Mapping[str, KeptProcess], now: float) -> list[Command]:
    """The workers are this scheduler's from now on. processes: as the forkserver kept them, by
    worker; those on hosts are met when the agent of each has joined (`meet`), or was not heard for
    too long.
    """
    again = scaling.repeat(table)
    table.joins_until, table.drains_until = now + table.limits.start_s, now + table.limits.drain_s
    for host in table.hosts.values():
        host.is_met, host.heard_at = not host.is_alive, now
    for record in table:
        _expect(record, now)
    met = [record for record in table if table.is_met(record)]
    return [*_take(table, met, processes, now, again), Outlive()]


def meet(
    table: Table, records: Sequence[WorkerRecord], processes: Mapping[str, KeptProcess], now: float
) -> list[Command]:
    """The workers of one host are this scheduler's, too."""
    return _take(table, records, processes, now, [])


def _take(
    table: Table,
    records: Sequence[WorkerRecord],
    processes: Mapping[str, KeptProcess],
    now: float,
    again: list[Command],
) -> list[Command]:
    for record in records:
        _meet(record, processes.get(record.name), now)
    commands: list[Command] = []
    for record in records:
        commands += _adopt(table, record, processes.get(record.name), now)
    commands += again
    for record in [record for record in records if record.life is Life.READY]:
        missed = [
            message
            for node in record.nodes
            for message in table.run.commands_for(node, again=False)
        ]
        commands += knob_policy.tell(table, record)
        commands += [
            Send(record.name, Start()),
            *(Send(record.name, message) for message in missed),
        ]
    return commands


def _expect(record: WorkerRecord, now: float) -> None:
    """Nobody knows yet what became of the worker; messages reach nobody before it has found this
    scheduler.
    """
    record.forked_at = record.heard_at = now
    record.is_reachable = False


def _meet(record: WorkerRecord, process: KeptProcess | None, now: float) -> None:
    """What this scheduler finds by itself."""
    record.forked_at = record.heard_at = now
    record.has_process = process is not None and process.alive
    record.is_reachable = record.is_reachable or not record.has_process
    if process is not None:
        record.pid = process.pid
        record.attempt = process.attempt if process.alive else max(record.attempt, process.attempt)


def _adopt(
    table: Table, record: WorkerRecord, process: KeptProcess | None, now: float
) -> list[Command]:
    if record.has_process:
        if record.life in (Life.READY, Life.ENDING):
            record.wired = True
            return []
        record.restart_at, record.wired = None, False
        record.die("was not at work when the scheduler ended", now)
        return [Signal(record.name, signal.SIGKILL)]
    if record.life is Life.GONE:
        return []
    if record.may_end:
        record.life = Life.GONE
        return scaling.exited(table, record)
    if record.life is Life.ENDING or table.run.over:
        record.life = Life.GONE
        return []
    if record.restart_at is not None:
        is_fault = recovery.has_failed(record)
        return [FaultNoticed(record.name, record.cause, record.attempt, now)] if is_fault else []
    return lifecycle.fell(
        table,
        record,
        "was never started" if process is None else lifecycle.how(process.status),
        now,
    )
