"""The scheduler's decisions: what happens changes the table of workers, and says what is to be done.

`reduce(table, event, now)` is all that changes a table; it reads no clock and touches nothing outside. Events are
messages of workers, what the forkserver tells of processes, wishes, and time that passes; commands are processes to
start, messages and signals to send, and what people are to know (`events`). A scheduler that takes over begins with
the table that the one before left (`folder.snapshot`), and an event of its own.

The life of a worker, attempt by attempt; `Membership`, its place in the graph, stays over all of them (`scaling`):

    FORKED ---- Hello ---> STARTING ---- Ready ---> READY ---- Bye, as it was told ---> ENDING
       |                      |                       |                                    |
       +----------------------+-- Failed, or killed: -+                                    |
       |                      v   it hangs, is stuck  |                                    |
       |                    DYING                     |                                    |
       |                      |                       |                                    |
       +------ exited --------+------ exited ---------+                                    |
                              v                                                            v
            FORKED <--- DOWN: waits for `restart_at`, or is given up as the run ends ---> GONE

    exited, and its membership is STOPPING ---> GONE, and LEFT
    a scheduler takes over:  READY, ENDING and alive: stay;  not at work and alive: DYING;  ended: DOWN, GONE

Before all were READY once the first fault ends the run. What is sent to a worker that is not wired yet is left out, as
`Wire` will tell it; what is sent to one that has not found this scheduler waits until it speaks.
"""

import signal

from dataflow.errors import DeadlineError, GraphError, RunError, WorkerDied
from dataflow.folder.faults import STOPPED
from dataflow.limits import drains_too_long, joins_too_long, starts_too_long
from dataflow.planning.wiring import edges
from dataflow.scheduler import failover, lifecycle, recovery, scaling
from dataflow.scheduler.events import (
    Close,
    Command,
    Drain,
    End,
    Event,
    FaultNoticed,
    FaultRecovered,
    ForkserverGone,
    Launch,
    Notice,
    Outlive,
    ProcessEvent,
    Received,
    Refuse,
    Send,
    Signal,
    Spawn,
    TakeOver,
    Tick,
    Wish,
)  # fmt: skip
from dataflow.scheduler.table import Life, Table, WorkerRecord, how
from dataflow.worker.messages import (
    DECIDE_NOTHING,
    Bye,
    Confirmed,
    Failed,
    FromWorker,
    Heard,
    Heartbeat,
    Hello,
    NodeCommand,
    Ready,
    Stacks,
    Start,
    Stop,
    Wire,
)  # fmt: skip


def reduce(table: Table, event: Event, now: float) -> list[Command]:
    """Take in what has happened at `now`; what is to be done, in order."""
    commands: list[Command] = []
    match event:
        case Launch():
            commands = _launch(table, now)
        case TakeOver():
            commands = failover.take_over(table, event.processes, now)
        case Received():
            commands = _received(table, event.name, event.message, now)
        case ProcessEvent():
            commands = _process(table, event, now)
        case ForkserverGone():
            commands = _forkserver_gone(table)
        case Wish():
            commands = scaling.wish(table, event.wishes)
        case Drain():
            commands = _drain(table, now)
        case Close():
            table.is_closing = True
            commands = [Send(record.name, Stop()) for record in table]
        case Tick():
            commands = _tick(table, now)
    return _noted(table, commands, now)


def _noted(table: Table, commands: list[Command], now: float) -> list[Command]:
    """Note the attempts that begin; leave out the messages that their workers cannot hear yet."""
    found: list[Command] = []
    for command in commands:
        if isinstance(command, Spawn):
            record = table.workers[command.name]
            record.fork(now)
            if record is table.joining:
                table.joins_until = now + table.limits.start_s
        elif isinstance(command, Send):
            record = table.workers[command.to]
            record.wired |= isinstance(command.message, Wire)
            if not record.wired and not isinstance(command.message, (*DECIDE_NOTHING, Stop)):
                continue
            if not record.is_reachable:
                record.deferred.append(command.message)
                continue
        found.append(command)
    return found


def _launch(table: Table, now: float) -> list[Command]:
    """Start all, light ones first."""
    table.starts_until = now + table.limits.start_s
    records = sorted(table, key=lambda record: not table.graph.is_light(record.nodes))
    return [Spawn(name=record.name) for record in records]


def _begin(table: Table) -> list[Command]:
    """All are ready: the run begins."""
    table.begun = True
    commands = _to_nodes(table, table.run.start())
    commands += [Send(record.name, Start()) for record in table]
    return [*commands, *scaling.advance(table), Outlive()]


# Messages of workers


def _received(table: Table, name: str, message: FromWorker, now: float) -> list[Command]:
    record = table.workers.get(name)
    if record is None:
        return [Refuse(f"'{name}', who is no worker,")]
    commands: list[Command] = [Send(name, waited) for waited in record.deferred]
    record.is_reachable, record.deferred = True, []
    if table.is_closing or message.attempt != record.attempt or not record.is_live:
        return commands  # the last words of an attempt that has ended
    if not _is_of(table, record, message):
        return [*commands, Refuse(f"'{name}'")]
    if record.life is not Life.DYING:
        record.heard_at = now
    elif not isinstance(message, Heartbeat):
        return commands
    match message:
        case Hello():
            record.pid, record.life, record.addresses = message.pid, Life.STARTING, message.addresses
            commands += scaling.hello(table, record) if table.begun else _wire_all(table)
        case Ready():
            record.life = Life.READY
            if table.begun:
                commands += lifecycle.go_on(table, record, now)
            elif all(each.life is Life.READY for each in table):
                commands += _begin(table)
        case Confirmed():
            commands += scaling.confirmed(table, message.ticket)
        case Heartbeat():
            commands += _heartbeat(table, record, message)
        case Stacks():
            record.stacks = (now, message.threads)
        case Failed():
            record.die(f"failed: {message.message}", now, lasting=message.lasting)
            if not table.begun:
                commands.append(End(RunError(f"worker '{name}' {record.cause}")))
        case Bye():
            record.life = Life.ENDING
    return commands


def _is_of(table: Table, record: WorkerRecord, message: FromWorker) -> bool:
    """Whether a message names what belongs to its worker."""
    if isinstance(message, Heartbeat):
        return set(message.nodes) <= set(record.nodes)
    if isinstance(message, Hello):
        nodes = record.nodes
        ends = [edge.name for edge in edges(table.graph) if edge.consumer in nodes and edge.producer not in nodes]
        return set(ends) == set(message.addresses)
    return True


def _wire_all(table: Table) -> list[Command]:
    """Tell all where to send, as soon as each has said where it receives."""
    if any(record.life is Life.FORKED for record in table):
        return []
    found: dict[str, list[str]] = {}
    for record in table:
        for edge, address in record.addresses.items():
            found.setdefault(edge, []).append(address)
    return [Send(record.name, Wire(addresses=found)) for record in table]


def _heartbeat(table: Table, record: WorkerRecord, message: Heartbeat) -> list[Command]:
    record.heartbeat = message
    commands: list[Command] = [Send(record.name, Heard())]
    if message.drained:
        commands += scaling.drained(table, record)
    if message.alone:
        return commands  # it ends because nobody spoke to it, not because anything is done
    for node, report in message.nodes.items():
        commands += _to_nodes(table, table.run.hear(node, report.status))
        if report.ended and table.all_ended(node):
            commands += _to_nodes(table, table.run.ended(node))
    return commands


def _to_nodes(table: Table, messages: list[NodeCommand]) -> list[Command]:
    """To all workers of a node that are at work; others hear what counts when they are."""
    return [
        Send(record.name, message) for message in messages for record in table
        if message.node in record.nodes and record.life is Life.READY
    ]  # fmt: skip


# Processes


def _process(table: Table, event: ProcessEvent, now: float) -> list[Command]:
    record = table.workers.get(event.name)
    if record is None:
        return []
    stopped_since, record.stopped_since = record.stopped_since, None
    if event.what == "started":
        record.has_process = True
    elif event.what == "stopped":
        record.stopped_since = now
    elif event.what == "continued" and stopped_since is None and record.life is Life.READY:
        return [FaultRecovered(record.name, f"worker {record.name} {STOPPED}, and was let go on")]
    elif event.what == "exited":
        return _exited(table, record, event.status, now)
    return []


def _exited(table: Table, record: WorkerRecord, status: int | None, now: float) -> list[Command]:
    record.has_process = False
    if record.may_end and not table.is_closing:
        record.life = Life.GONE
        return scaling.exited(table, record)
    if record.life is Life.ENDING or table.is_closing:
        record.life = Life.GONE
    elif record.is_live:
        return lifecycle.fell(table, record, record.cause or how(status), now)
    return []


def _forkserver_gone(table: Table) -> list[Command]:
    for record in table:
        record.has_process = False
    if table.is_closing:
        return []
    return [End(WorkerDied(f"the forkserver ended unexpectedly; see logs in {table.folder}/logs"))]


# Wishes and time


def _drain(table: Table, now: float) -> list[Command]:
    table.drains_until = now + table.limits.drain_s
    down = [record for record in table if record.life is Life.DOWN]
    commands = _to_nodes(table, table.run.drain())
    return [command for record in down for command in lifecycle.give_up(table, record)] + commands


def _tick(table: Table, now: float) -> list[Command]:
    commands: list[Command] = []
    while table.schedule and table.schedule[0][0] <= table.run.step and not table.is_ending:
        wishes = table.schedule.pop(0)[1]
        try:  # what has no room beside what else was wished is only told
            scaling.check(table, wishes)
            commands += scaling.wish(table, wishes)
        except GraphError as error:
            commands.append(Notice(str(error)))
    commands += _watch(table, now)
    recovery.progressed(table, table.run.progress, now)
    due = recovery.restart(table, now)
    return commands + [Spawn(name=record.name, senders=scaling.senders(table, record)) for record in due]


def _watch(table: Table, now: float) -> list[Command]:
    """Whoever stands still or hangs, and what takes too long."""
    commands: list[Command] = []
    before, table.watched_at = table.watched_at, now
    for record in table:
        if now - before > table.limits.hang_s:
            record.heard_at = now  # the scheduler was stopped itself, and perhaps the workers with it
        commands += _let_go_on(table, record, now)
        cause = recovery.overdue(table, record, now)
        if cause is not None:
            commands += lifecycle.kill(table, record, cause, now)
    error: DeadlineError | None = None
    if not table.begun and now > table.starts_until:
        late = [record.name for record in table if record.life is not Life.READY]
        error = starts_too_long(table.limits, table.folder, late)
    if table.run.draining and not table.run.over and now > table.drains_until:
        error = drains_too_long(table.limits, table.folder)
    newcomer = table.joining
    if newcomer is not None and now > table.joins_until:
        error = joins_too_long(table.limits, table.folder, newcomer.name, scaling.missing(table, newcomer))
    return commands if error is None else [*commands, End(error)]


def _let_go_on(table: Table, record: WorkerRecord, now: float) -> list[Command]:
    """Nobody knows whether whoever stopped a worker will ever come back, and the run waits for it meanwhile."""
    since = record.stopped_since
    if since is None or now - since <= table.limits.stopped_s:
        return []
    record.stopped_since = None
    noticed = [FaultNoticed(record.name, STOPPED, record.attempt, since)] if record.life is Life.READY else []
    return [*noticed, Signal(record.name, signal.SIGCONT)]
