"""Which hosts a run has, and what becomes of the workers of one that is lost: a policy over the
table.

A host is lost when its agent has ended, or was not heard for `Limits.hang_s`. All of its workers
have fallen then, whatever they still do: no word of their attempts counts any more. They are
started again where there is room (`seating`), or on a host that joins. A worker elsewhere that has
ranks there is ended, and started again likewise. A lost host that is back, as after a cut of the
network, ends what it still has before anything is started there; once it has been back for a while,
those go back whom the plan has there.
"""

from collections.abc import Mapping

from dataflow.errors import RunError
from dataflow.limits import no_host_for_too_long
from dataflow.scheduler import failover, lifecycle, recovery, scaling, seating
from dataflow.scheduler.events import Clear, Command, EndRun, HostJoined, KeptProcess, NotifyUser
from dataflow.scheduler.table import HostRecord, Life, Table, WorkerRecord


def joined(table: Table, event: HostJoined, now: float) -> list[Command]:
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
        return failover.meet(table, _of(table, host.name), event.processes, now)
    return _missed(table, host, event.processes, now)


def heard(table: Table, name: str, now: float) -> None:
    """The agent of a host gives a sign of life."""
    host = table.hosts.get(name)
    if host is not None:
        host.heard_at = now


def counts(table: Table, record: WorkerRecord, host: str) -> bool:
    """Whether what a host tells of a worker's process is told of the attempt that runs."""
    return record.host == host and (not host or table.hosts[host].is_alive)


def lost(table: Table, name: str, cause: str, now: float) -> list[Command]:
    """A host's workers have fallen, and nothing it still says counts. cause: what comes after its
    name.
    """
    host = table.hosts.get(name)
    if host is None or not host.is_alive:
        return []
    host.is_alive, host.is_met, host.cause = False, True, cause
    workers = [record for record in _of(table, name) if record.life is not Life.GONE]
    names = ", ".join(record.name for record in workers)
    commands: list[Command] = [
        NotifyUser(f"host '{name}' {cause}; with it fell {names or 'no worker'}")
    ]
    for record in sorted(workers, key=lambda record: record.may_end):
        record.stopped_since = None
        commands += lifecycle.exited(
            table, record, f"was on host '{name}', which {cause}", now, with_host=True
        )
    for record in table:
        if (
            name in record.rank_hosts
            and record.host != name
            and record.has_process
            and record.life is not Life.DYING
        ):
            commands += lifecycle.kill(
                table, record, f"had ranks on host '{name}', which {cause}", now
            )
    recovery.host_lost(table, host, now)
    if table.hopeless is not None:
        commands.append(EndRun(RunError(f"{table.hopeless} ({table.folder})")))
    return commands


def watch(table: Table, now: float, *, was_stopped: bool) -> list[Command]:
    """Hosts that are silent for too long, and workers for which no host has room. was_stopped: this
    scheduler was stopped, and has heard nobody meanwhile.
    """
    commands: list[Command] = []
    for host in table.hosts.values():
        if was_stopped:
            host.heard_at = now
        if host.is_alive and now - host.heard_at > table.limits.hang_s:
            commands += lost(
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
        if record.life is Life.READY and seating.may_go_home(table, record, settled)
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
        commands += lifecycle.kill(
            table, record, f"{recovery.ENDED} go back to the host that was planned", now
        )
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
            and process.attempt == record.attempt
        ):
            commands += lifecycle.exited(
                table, record, record.cause or lifecycle.how(process.status), now
            )
    return commands


def _wait_for_room(table: Table, now: float) -> list[Command]:
    """Say once what the run waits for, and end it after the limit."""
    homeless = seating.homeless(table, now)
    if not homeless:
        table.no_room_since = None
        return []
    if table.no_room_since is None:
        table.no_room_since = now
        return [
            NotifyUser(
                f"{seating.wanted(table, homeless)}; the run waits {table.limits.host_s:.0f} s for"
                " a host that joins (Limits.host_s)"
            )
        ]
    if now - table.no_room_since > table.limits.host_s:
        return [
            EndRun(
                no_host_for_too_long(table.limits, table.folder, seating.wanted(table, homeless))
            )
        ]
    return []
