"""What becomes of one worker's process, and who is told: the transitions of `Life` that several
policies share.
"""

import signal

from msgspec.structs import replace

from dataflow.errors import RunError, WorkerDied
from dataflow.folder.faults import STOPPED
from dataflow.scheduler import recovery, scaling
from dataflow.scheduler.events import (
    Command,
    EndRanks,
    EndRun,
    FaultNoticed,
    FaultRecovered,
    Send,
    Signal,
)
from dataflow.scheduler.swaps import policy as swapping
from dataflow.scheduler.table import Life, Table, WorkerRecord
from dataflow.worker.messages import ALONE, Bye


def exited(
    table: Table, record: WorkerRecord, cause: str, now: float, *, with_host: bool = False
) -> list[Command]:
    """A worker's process has ended, as it was told or not, and its ranks on other hosts are to end
    with it; `with_host`: as a host of it was lost.
    """
    record.has_process = False
    ranks: list[Command] = [EndRanks(record.name, record.attempt)] if record.is_spread else []
    if record.may_end and not table.is_closing:
        record.life = Life.GONE
        # which the next scheduler could not ask for
        record.earlier, record.heartbeat = record.told, None
        return [*ranks, *scaling.exited(table, record)]
    if record.life is Life.ENDING or table.is_closing:
        record.life = Life.GONE
    elif record.is_live:
        return [*ranks, *fell(table, record, cause, now, with_host=with_host)]
    return ranks


def fell(
    table: Table, record: WorkerRecord, cause: str, now: float, *, with_host: bool = False
) -> list[Command]:
    """A worker has ended that should not have: it is started again later, if there is hope; one
    that fell with its host has not failed itself, and one that was ended for a swap has not failed
    at all.
    """
    noticed: list[Command] = [
        FaultNoticed(record.name, cause, record.attempt, record.heard_at, record.begun)
    ]
    if is_planned := not recovery.has_failed(record):
        noticed, cause = [], record.cause
    record.fall(cause)
    if table.is_ending:
        return [*noticed, *give_up(table, record)]
    commands = [*noticed, *scaling.fell(table, record)]
    if with_host or is_planned:
        recovery.moves(record, now)
    else:
        recovery.died(table, record, cause, now)
    if table.hopeless is not None:
        error = RunError if record.lasting else WorkerDied
        commands.append(EndRun(error(f"{table.hopeless} ({table.folder})")))
    return commands


def give_up(table: Table, record: WorkerRecord) -> list[Command]:
    """A worker is down while the run is ending: without a trainer that is not done it cannot end as
    it should, nor one that never began.
    """
    record.life, record.restart_at = Life.GONE, None
    if not table.begun:
        return [EndRun(WorkerDied(table.obituary(record)))]
    if any(
        table.graph.operators[node].trains and not table.run.is_done(node) for node in record.nodes
    ):
        return [
            EndRun(
                WorkerDied(
                    f"{table.obituary(record)}; the run was ending, and its last checkpoint is good"
                )
            )
        ]
    return []


def kill(table: Table, record: WorkerRecord, cause: str, now: float) -> list[Command]:
    """End a worker that does not go on by itself."""
    record.die(cause, now)
    return [Signal(record.name, signal.SIGKILL)]


def go_on(table: Table, record: WorkerRecord, now: float) -> list[Command]:
    """Let a worker begin that has just become ready: a newcomer, or one that was started again."""
    commands: list[Command] = [
        Send(record.name, message)
        for node in record.nodes
        for message in table.run.commands_for(node)
    ]
    commands += scaling.ready(table, record)
    recovery.recovered(record, now)
    return [*commands, FaultRecovered(record.name), *swapping.ready(table, record)]


def wake(table: Table, record: WorkerRecord, now: float) -> list[Command]:
    """Wake a stopped worker: nobody knows whether it would ever go on, and the run waits for it."""
    since = record.stopped_since
    if since is None or now - since <= table.limits.stopped_s:
        return []
    record.stopped_since = None
    noticed = (
        [FaultNoticed(record.name, STOPPED, record.attempt, since)]
        if record.life is Life.READY
        else []
    )
    return [*noticed, Signal(record.name, signal.SIGCONT)]


def how(status: int | None) -> str:
    """How a process ended with this status, as text; a signal's number is below 0."""
    if status is None:
        return "ended for an unknown reason"
    if status == ALONE:
        return "ended, as no scheduler spoke to it"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"died ({signal.Signals(-status).name})"
    except ValueError:
        return f"died (signal {-status})"


def count(record: WorkerRecord, message: Bye) -> None:
    """Count what has crossed a worker's edges to its end, whether its end is known or not."""
    if record.heartbeat is not None:
        record.heartbeat = replace(record.heartbeat, crossed=message.crossed)
    else:
        record.earlier = {
            **record.earlier,
            "crossed": {**record.earlier.get("crossed", {}), **message.crossed},
        }
