"""What becomes of a worker whose process, host or scheduler is lost, when it is started again, and
when the run gives up: a policy over the table.

Each restart of a worker waits twice as long as the one before it (`Limits.patience`), unless the
worker was at work for a while, or the run came further with it. Too many failures of one worker
without progress, or of all in some minutes, are hopeless; so is what a restart does not mend.
"""

import collections
import signal
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from dataflow.errors import RunError, WorkerDied
from dataflow.folder.faults import STOPPED
from dataflow.limits import no_host_for_too_long
from dataflow.scheduler import live_changes, scaling, seating
from dataflow.scheduler.events import (
    Clear,
    Command,
    EndRanks,
    EndRun,
    FaultNoticed,
    FaultRecovered,
    HostJoined,
    KeptProcess,
    NotifyUser,
    Outlive,
    Send,
    Signal,
)
from dataflow.scheduler.table import ENDED, Failure, HostRecord, ProcessState, Table, WorkerRecord
from dataflow.system.messages import Life
from dataflow.worker.messages import ALONE, Bye, Start

_END_S = 5.0
"""Seconds for a failed or killed worker to be gone; then it is killed again."""
_LOADING = 4
"""A worker that is starting may be silent for so many times `Limits.hang_s`: imports hold up its
heartbeat."""


def has_failed(record: WorkerRecord) -> bool:
    """Whether the cause of an end is a fault."""
    return not record.cause.startswith(ENDED)


def died(table: Table, record: WorkerRecord, cause: str, now: float) -> None:
    """The attempt under way has ended; a worker that waits for its restart cannot die again."""
    if record.restart_at is not None:
        return
    patience, since = table.limits.patience, record.at_work_since
    quiet = since is not None and (now - since >= patience.quiet_s or table.progressed_at > since)
    table.failures.append(Failure(record.name, record.life.attempt, cause, now))
    longest_s = max(patience.of_one_s, patience.of_all_s)
    table.failures = [failure for failure in table.failures if now - failure.at <= longest_s]
    record.delay_s = patience.first_s if quiet or not record.delay_s else 2 * record.delay_s
    record.delay_s = min(record.delay_s, patience.most_s)
    record.restart_at, record.at_work_since = now + record.delay_s, None
    if table.hopeless is None:
        table.hopeless = (
            _for_good(table, record.name, cause)
            if record.lasting
            else _judge(table, record.name, now)
        )


def moves(record: WorkerRecord, now: float) -> None:
    """The attempt under way has ended with its host, or for a swap: the next one may begin at once,
    where there is room.
    """
    if record.restart_at is None:
        record.restart_at, record.at_work_since = now, None


def host_lost(table: Table, host: HostRecord, now: float) -> None:
    """A host was lost; one that comes back and is lost again and again is a failure of the run."""
    since = max(table.progressed_at, now - table.limits.patience.of_one_s)
    host.losses = [at for at in host.losses if at >= since] + [now]
    if table.hopeless is None and len(host.losses) >= table.limits.patience.of_one:
        table.hopeless = (
            f"host '{host.name}' was lost {len(host.losses)} times in {now - host.losses[0]:.0f} s,"
            f" and the run made no progress in between: at last it {host.cause}; leave it out, and"
            " resume the run"
        )


def recovered(record: WorkerRecord, now: float) -> None:
    """A worker that was started again is at work."""
    if record.life.attempt and record.restart_at is None and record.at_work_since is None:
        record.at_work_since = now


def progressed(table: Table, steps: int, now: float) -> None:
    """The run has made so many steps; steps that are made again are no progress."""
    if steps > table.made:
        table.made, table.progressed_at = steps, now


def restart(table: Table, now: float) -> list[WorkerRecord]:
    """The workers whose next attempt begins now; none of them is given twice, and none while the
    run ends.
    """
    if table.is_ending or table.hopeless is not None:
        return []
    due = seating.seat(table, (record for record in table if record.is_due(now)))
    for record in due:
        record.life, record.restart_at = Life(table.scheduler, record.life.attempt + 1), None
    return due


def overdue(table: Table, record: WorkerRecord, now: float) -> str | None:
    """Why a worker is to be killed; None: it need not."""
    limits, host = table.limits, table.hosts.get(record.host)
    # none of a silent host can be heard
    silent = (now if host is None else min(now, host.heard_at)) - record.heard_at
    if record.process is ProcessState.DYING:
        return record.cause if now - record.dying_since > _END_S else None
    if record.process is ProcessState.READY:
        if silent > limits.hang_s:
            return f"has not answered for {silent:.0f} s"
        if record.heartbeat and record.heartbeat.turned_s > limits.stuck_s:
            return f"was stuck in one slice of work for {record.heartbeat.turned_s:.0f} s"
        if record.heartbeat and record.heartbeat.asleep_s > limits.asleep_s:
            idle_s = record.heartbeat.asleep_s
            return f"was stuck in one slice of work, and has computed nothing for {idle_s:.0f} s"
    elif (
        table.begun
        and record.process is ProcessState.STARTING
        and silent > _LOADING * limits.hang_s
    ):
        return f"has not answered for {silent:.0f} s while it started"
    elif (
        record.process in (ProcessState.FORKED, ProcessState.STARTING)
        and record.is_away
        and now - record.forked_at > limits.start_s
    ):
        return f"was not ready within {limits.start_s:.0f} s"
    return None


def _judge(table: Table, worker: str, now: float) -> str | None:
    """Why there is no hope, after a failure of `worker`."""
    patience = table.limits.patience
    since = max(table.progressed_at, now - patience.of_one_s)
    own = [
        failure for failure in table.failures if failure.worker == worker and failure.at >= since
    ]
    if len(own) >= patience.of_one:
        return (
            f"worker '{worker}' failed {len(own)} times in {now - own[0].at:.0f} s, and the run"
            f" made no progress in between: {_causes(own)}; see logs/{worker}.log, mend the cause,"
            " and resume the run"
        )
    recent = [failure for failure in table.failures if now - failure.at <= patience.of_all_s]
    if len(recent) >= patience.of_all:
        return (
            f"workers failed {len(recent)} times in {now - recent[0].at:.0f} s: {_causes(recent)};"
            " see their logs, mend the cause, and resume the run"
        )
    return None


def _for_good(table: Table, worker: str, cause: str) -> str:
    earlier = [failure for failure in table.failures[:-1] if failure.worker == worker]
    before = f" (before that: {_causes(earlier)})" if earlier else ""
    return (
        f"worker '{worker}' {cause}; a restart would not mend that{before}; see logs/{worker}.log"
    )


def _causes(failures: Iterable[Failure]) -> str:
    """Every cause with how often it was, by worker."""
    counts = collections.Counter((failure.worker, failure.cause) for failure in failures)
    return "; ".join(
        f"'{worker}' {cause}{f' ({n} times)' if n > 1 else ''}"
        for (worker, cause), n in counts.items()
    )


# What becomes of one worker's process, and who is told: the transitions of `ProcessState` that
# several policies share.


def exited(
    table: Table, record: WorkerRecord, cause: str, now: float, *, with_host: bool = False
) -> list[Command]:
    """A worker's process has ended, as it was told or not, and its ranks on other hosts are to end
    with it; `with_host`: as a host of it was lost.
    """
    record.has_process = False
    ranks: list[Command] = [EndRanks(record.name, record.life)] if record.is_spread else []
    if record.may_end and not table.is_closing:
        record.process = ProcessState.GONE
        # which the next scheduler could not ask for
        record.earlier, record.heartbeat = record.told, None
        return [*ranks, *scaling.exited(table, record)]
    if record.process is ProcessState.ENDING or table.is_closing:
        record.process = ProcessState.GONE
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
        FaultNoticed(record.name, cause, record.life.attempt, record.heard_at, record.begun)
    ]
    if is_planned := not has_failed(record):
        noticed, cause = [], record.cause
    record.fall(cause)
    if table.is_ending:
        return [*noticed, *give_up(table, record)]
    commands = [*noticed, *scaling.fell(table, record)]
    if with_host or is_planned:
        moves(record, now)
    else:
        died(table, record, cause, now)
    if table.hopeless is not None:
        error = RunError if record.lasting else WorkerDied
        commands.append(EndRun(error(f"{table.hopeless} ({table.folder})")))
    return commands


def give_up(table: Table, record: WorkerRecord) -> list[Command]:
    """A worker is down while the run is ending: without a trainer that is not done it cannot end as
    it should, nor one that never began.
    """
    record.process, record.restart_at = ProcessState.GONE, None
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
    recovered(record, now)
    return [*commands, FaultRecovered(record.name), *live_changes.swap_ready(table, record)]


def wake(table: Table, record: WorkerRecord, now: float) -> list[Command]:
    """Wake a stopped worker: nobody knows whether it would ever go on, and the run waits for it."""
    since = record.stopped_since
    if since is None or now - since <= table.limits.stopped_s:
        return []
    record.stopped_since = None
    noticed = (
        [FaultNoticed(record.name, STOPPED, record.life.attempt, since)]
        if record.process is ProcessState.READY
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


# A scheduler takes the place of one that has died, or was replaced: a policy over the table that
# this one has left. Whoever was at work stays so, and hears again what it may have missed. Whoever
# was not, because it was starting, or had died, or died meanwhile, has fallen, and is started
# again like any other.


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
    for record in [record for record in records if record.process is ProcessState.READY]:
        missed = [
            message
            for node in record.nodes
            for message in table.run.commands_for(node, again=False)
        ]
        commands += live_changes.tell_changes(table, record)
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
        record.life = process.life if process.alive else max(record.life, process.life)


def _adopt(
    table: Table, record: WorkerRecord, process: KeptProcess | None, now: float
) -> list[Command]:
    if record.has_process:
        if record.process in (ProcessState.READY, ProcessState.ENDING):
            record.wired = True
            return []
        record.restart_at, record.wired = None, False
        record.die("was not at work when the scheduler ended", now)
        return [Signal(record.name, signal.SIGKILL)]
    if record.process is ProcessState.GONE:
        return []
    if record.may_end:
        record.process = ProcessState.GONE
        return scaling.exited(table, record)
    if record.process is ProcessState.ENDING or table.run.over:
        record.process = ProcessState.GONE
        return []
    if record.restart_at is not None:
        is_fault = has_failed(record)
        return (
            [FaultNoticed(record.name, record.cause, record.life.attempt, now)] if is_fault else []
        )
    return fell(
        table,
        record,
        "was never started" if process is None else how(process.status),
        now,
    )


# Which hosts a run has, and what becomes of the workers of one that is lost: a policy over the
# table. A host is lost when its agent has ended, or was not heard for `Limits.hang_s`. All of its
# workers have fallen then, whatever they still do: no word of their attempts counts any more. They
# are started again where there is room (`seating`), or on a host that joins. A worker elsewhere
# that has ranks there is ended, and started again likewise. A lost host that is back, as after a
# cut of the network, ends what it still has before anything is started there; once it has been
# back for a while, those go back whom the plan has there.


def host_joined(table: Table, event: HostJoined, now: float) -> list[Command]:
    """The agent of a host is there: a new one, one that comes back, or that of a run that is taken
    over.
    """
    host = table.hosts.get(event.host.name)
    has_processes = any(process.alive for process in event.processes.values())
    if host is None or not host.is_alive:
        if has_processes:
            return [Clear(event.host.name)]
        return _enter(table, event, now)
    host.heard_at = now
    if not host.is_met:
        host.is_met = True
        return meet(table, _of(table, host.name), event.processes, now)
    return _missed(table, host, event.processes, now)


def host_heard(table: Table, name: str, now: float) -> None:
    """The agent of a host gives a sign of life."""
    host = table.hosts.get(name)
    if host is not None:
        host.heard_at = now


def is_current(table: Table, record: WorkerRecord, host: str) -> bool:
    """Whether what a host tells of a worker's process is told of the attempt that runs."""
    return record.host == host and (not host or table.hosts[host].is_alive)


def lose_host(table: Table, name: str, cause: str, now: float) -> list[Command]:
    """A host's workers have fallen, and nothing it still says counts. cause: what comes after its
    name.
    """
    host = table.hosts.get(name)
    if host is None or not host.is_alive:
        return []
    host.is_alive, host.is_met, host.cause = False, True, cause
    workers = [record for record in _of(table, name) if record.process is not ProcessState.GONE]
    names = ", ".join(record.name for record in workers)
    commands: list[Command] = [
        NotifyUser(f"host '{name}' {cause}; with it fell {names or 'no worker'}")
    ]
    for record in sorted(workers, key=lambda record: record.may_end):
        record.stopped_since = None
        commands += exited(
            table, record, f"was on host '{name}', which {cause}", now, with_host=True
        )
    for record in table:
        if (
            name in record.rank_hosts
            and record.host != name
            and record.has_process
            and record.process is not ProcessState.DYING
        ):
            commands += kill(table, record, f"had ranks on host '{name}', which {cause}", now)
    host_lost(table, host, now)
    if table.hopeless is not None:
        commands.append(EndRun(RunError(f"{table.hopeless} ({table.folder})")))
    return commands


def watch_hosts(table: Table, now: float, *, was_stopped: bool) -> list[Command]:
    """Hosts that are silent for too long, and workers for which no host has room. was_stopped: this
    scheduler was stopped, and has heard nobody meanwhile.
    """
    commands: list[Command] = []
    for host in table.hosts.values():
        if was_stopped:
            host.heard_at = now
        if host.is_alive and now - host.heard_at > table.limits.hang_s:
            commands += lose_host(
                table, host.name, f"was not heard for {now - host.heard_at:.0f} s", now
            )
    return commands + _wait_for_room(table, now) + _go_back(table, now)


def _go_back(table: Table, now: float) -> list[Command]:
    """End each moved worker once its planned host has been back for a while and nobody is away."""
    quiet_s = max(table.limits.hang_s, table.limits.patience.quiet_s)
    settled = {host.name for host in table.hosts.values() if now - host.back_at > quiet_s}
    if (
        not table.begun
        or table.is_ending
        or table.joining is not None
        or scaling.anybody_away(table)
    ):
        return []
    moved = [
        record
        for record in table
        if record.process is ProcessState.READY and seating.may_go_home(table, record, settled)
    ]
    if not moved:
        return []
    names = ", ".join(
        f"{record.name} to '{table.plan.host(record.worker, record.replica)}'" for record in moved
    )
    commands: list[Command] = [
        NotifyUser(f"hosts are back for {quiet_s:.0f} s: {names} as planned")
    ]
    for record in moved:
        commands += kill(table, record, f"{ENDED} go back to the host that was planned", now)
    return commands


def _of(table: Table, host: str) -> list[WorkerRecord]:
    return [record for record in table if record.host == host]


def _enter(table: Table, event: HostJoined, now: float) -> list[Command]:
    """A host without processes of this run: workers may be started there."""
    host = event.host
    record = table.hosts.get(host.name)
    if record is not None and record.facts.own_folder != host.own_folder:
        return [
            NotifyUser(
                f"host '{host.name}' is back and {'does not see' if host.own_folder else 'sees'}"
                " the run folder, other than before; nothing is started there: let it see what it"
                " saw, or give it another name"
            )
        ]
    if record is not None and record.facts != host:
        return [
            NotifyUser(
                f"host '{host.name}' is back with {seating.size(host)}, but had"
                f" {seating.size(record.facts)}; nothing is started there: give it what it had, or"
                " another name"
            )
        ]
    if record is None:
        table.hosts[host.name] = HostRecord(facts=host, heard_at=now)
        return [NotifyUser(f"host '{host.name}' has joined with {seating.size(host)}")]
    record.is_alive, record.heard_at, record.back_at, record.cause = True, now, now, ""
    return [NotifyUser(f"host '{host.name}' is back")]


def _missed(
    table: Table, host: HostRecord, processes: Mapping[str, KeptProcess], now: float
) -> list[Command]:
    """The agent has found this scheduler again; of ends in between it may not have told."""
    commands: list[Command] = []
    for record in _of(table, host.name):
        process = processes.get(record.name)
        if (
            record.has_process
            and process is not None
            and not process.alive
            and process.life == record.life
        ):
            commands += exited(table, record, record.cause or how(process.status), now)
    return commands


def _wait_for_room(table: Table, now: float) -> list[Command]:
    """Say once what the run waits for, and end it after the limit."""
    lack, limits = seating.no_room(table, now), table.limits
    if not lack:
        table.no_room_since = None
    elif table.no_room_since is None:
        table.no_room_since = now
        text = f"{lack}; the run waits {limits.host_s:.0f} s for a host that joins"
        return [NotifyUser(f"{text} (Limits.host_s)")]
    elif now - table.no_room_since > limits.host_s:
        return [EndRun(no_host_for_too_long(limits, table.folder, lack))]
    return []
