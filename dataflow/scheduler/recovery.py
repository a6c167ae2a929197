"""When a worker that died is started again, and when the run gives up: a policy over the table.

Each restart of a worker waits twice as long as the one before it (`Limits.patience`), unless the
worker was at work for a while, or the run came further with it. Too many failures of one worker
without progress, or of all in some minutes, are hopeless; so is what a restart does not mend.
"""

import collections
from collections.abc import Iterable

from dataflow.scheduler import seating
from dataflow.scheduler.table import Failure, HostRecord, Life, Table, WorkerRecord

ENDED = "was ended to"
"""How the cause begins of a worker that was ended on purpose, so that its next attempt is another,
or elsewhere."""
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
    table.failures.append(Failure(record.name, record.attempt, cause, now))
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
    if record.attempt and record.restart_at is None and record.at_work_since is None:
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
        record.attempt, record.restart_at = record.attempt + 1, None
    return due


def overdue(table: Table, record: WorkerRecord, now: float) -> str | None:
    """Why a worker is to be killed; None: it need not."""
    limits, host = table.limits, table.hosts.get(record.host)
    # none of a silent host can be heard
    silent = (now if host is None else min(now, host.heard_at)) - record.heard_at
    if record.life is Life.DYING:
        return record.cause if now - record.dying_since > _END_S else None
    if record.life is Life.READY:
        if silent > limits.hang_s:
            return f"has not answered for {silent:.0f} s"
        if record.heartbeat and record.heartbeat.turned_s > limits.stuck_s:
            return f"was stuck in one slice of work for {record.heartbeat.turned_s:.0f} s"
        if record.heartbeat and record.heartbeat.asleep_s > limits.asleep_s:
            idle_s = record.heartbeat.asleep_s
            return f"was stuck in one slice of work, and has computed nothing for {idle_s:.0f} s"
    elif table.begun and record.life is Life.STARTING and silent > _LOADING * limits.hang_s:
        return f"has not answered for {silent:.0f} s while it started"
    elif (
        record.life in (Life.FORKED, Life.STARTING)
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
