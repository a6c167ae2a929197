"""The scheduler's decisions: what happens changes the table of workers, and says what is to be
done.

`reduce(table, event, now)` is all that changes a table; it reads no clock and touches nothing
outside. Events are messages of workers, what the forkserver tells of processes, wishes, and time
that passes; commands are processes to start, messages and signals to send, and what people are to
know (`events`), which `control.Scheduler` carries out. A scheduler that takes over begins with the
table that the one before left (`folder.snapshot`), and an event of its own.

The `ProcessState` of a worker, attempt by attempt; `Membership`, its place in the graph, stays over
all of them (`scaling`):

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
    a scheduler takes over:  READY, ENDING and alive: stay;  not at work and alive: DYING;
                             ended: DOWN, GONE
    its host is lost:        DOWN, or GONE where it had ended; what that host still says does not
                             count (`recovery`)

Before all were READY once, a worker that says why it cannot start ends the run; one that is killed
meanwhile is started again. What is sent to a worker that is not wired yet is left out, as
`Wire` will tell it; what is sent to one that has not found this scheduler waits until it speaks.
"""

from dataflow.errors import DeadlineError, GraphError, RunError, WorkerDied
from dataflow.folder.faults import STOPPED
from dataflow.limits import drains_too_long, joins_too_long, starts_too_long
from dataflow.planning.wiring import edges
from dataflow.scheduler import events, live_changes, recovery, scaling
from dataflow.scheduler.table import Membership, ProcessState, Table, WorkerRecord
from dataflow.worker import messages


def reduce(table: Table, event: events.Event, now: float) -> list[events.Command]:
    """Take in what has happened at `now`; what is to be done, in order."""
    commands: list[events.Command] = []
    match event:
        case events.RunBegins():
            commands = _launch(table, now)
        case events.TakeOver():
            commands = recovery.take_over(table, event.processes, now)
        case events.HostJoined():
            commands = recovery.host_joined(table, event, now)
        case events.HostHeard():
            recovery.host_heard(table, event.host, now)
        case events.HostLost():
            commands = recovery.lose_host(table, event.host, event.cause, now)
        case events.Received():
            commands = _received(table, event, now)
        case events.ProcessEvent():
            commands = _process(table, event, now)
        case events.ForkserverGone():
            commands = _forkserver_gone(table)
        case events.Wish():
            commands = scaling.wish(table, event.wishes)
        case events.SwapIn():
            commands = live_changes.begin_swap(table, event.swap, now)
        case events.SetIn():
            commands = live_changes.begin_changes(table, event.changes, now)
        case events.WishCheckpoint():
            commands = _to_nodes(table, table.run.wish_checkpoint(event.number))
        case events.Drain():
            commands = _drain(table, now)
        case events.Shutdown():
            table.is_closing = True
            commands = [events.Send(record.name, messages.Stop()) for record in table]
        case events.Tick():
            commands = _tick(table, now)
    return _noted(table, commands, now)


def _noted(table: Table, commands: list[events.Command], now: float) -> list[events.Command]:
    """Note the attempts that begin; leave out the messages that their workers cannot hear yet."""
    sendable: list[events.Command] = []
    for command in commands:
        if isinstance(command, events.StartWorker):
            record = table.workers[command.name]
            record.fork(now, table.scheduler)
            if record.membership is Membership.JOINING:
                table.joins_until = now + table.limits.start_s
            if not table.begun:
                table.starts_until = now + table.limits.start_s
        elif isinstance(command, events.Send):
            record = table.workers[command.to]
            record.wired |= isinstance(command.message, messages.Wire)
            if not record.wired and not isinstance(
                command.message, (*messages.DECIDE_NOTHING, messages.Stop)
            ):
                continue
            if not record.is_reachable:
                record.deferred.append(command.message)
                continue
        sendable.append(command)
    return sendable


def _launch(table: Table, now: float) -> list[events.Command]:
    """Start all, light ones first."""
    for host in table.hosts.values():
        host.heard_at = now
    records = sorted(table, key=lambda record: not table.graph.is_light(record.nodes))
    return [events.StartWorker(name=record.name) for record in records]


def _begin(table: Table) -> list[events.Command]:
    """All are ready: the run begins."""
    table.begun = True
    commands = _to_nodes(table, table.run.start())
    commands += [events.Send(record.name, messages.Start()) for record in table]
    return [*commands, *scaling.advance(table), events.Outlive()]


# Messages of workers


def _received(table: Table, event: events.Received, now: float) -> list[events.Command]:
    name, message = event.name, event.message
    record = table.workers.get(name)
    if record is None:
        return [events.Refuse(f"'{name}', who is no worker,")]
    if message.life != record.life or event.host != record.host:
        return []  # another attempt is in its place, perhaps elsewhere
    commands: list[events.Command] = [events.Send(name, waited) for waited in record.deferred]
    record.is_reachable, record.deferred = True, []
    if isinstance(message, messages.Bye) and message.crossed:
        recovery.count(record, message)
    if table.is_closing or not record.is_live:
        return commands  # its last words
    if not _is_of(table, record, message):
        return [*commands, events.Refuse(f"'{name}'")]
    if record.process is not ProcessState.DYING:
        record.heard_at = now
    elif not isinstance(message, messages.Heartbeat):
        return commands
    match message:
        case messages.Hello():
            record.pid, record.machine, record.process = (
                message.pid,
                message.machine,
                ProcessState.STARTING,
            )
            commands += scaling.listens(table, record, message)
            if record.is_spread:
                commands.append(events.StartRanks(name, message.ranks_at))
            commands += scaling.hello(table, record) if table.begun else _wire_all(table)
        case messages.Ready():
            record.process = ProcessState.READY
            commands += [
                events.NotifyUser(note) for note in message.notes if note not in table.notes
            ]
            table.notes.update(message.notes)
            commands += live_changes.tell_changes(table, record)
            if table.begun:
                commands += recovery.go_on(table, record, now)
            else:
                recovery.recovered(record, now)
                commands.append(events.FaultRecovered(name))
                commands += (
                    _begin(table)
                    if all(other.process is ProcessState.READY for other in reversed(table))
                    else []
                )
        case messages.Confirmed():
            commands += scaling.confirmed(table, message.ticket)
        case messages.Heartbeat():
            commands += _heartbeat(table, record, message)
        case messages.Stacks():
            record.stacks = (now, message.threads)
        case messages.Failed() if (
            taken_back := live_changes.swap_failed(table, record, message, now)
        ) is not None:
            commands += taken_back
        case messages.Failed():
            record.die(f"failed: {message.message}", now, lasting=message.lasting)
            if not table.begun and message.error != WorkerDied.__name__:
                commands.append(events.EndRun(RunError(f"worker '{name}' {record.cause}")))
        case messages.Bye():
            record.process = ProcessState.ENDING
    return commands


def _is_of(table: Table, record: WorkerRecord, message: messages.FromWorker) -> bool:
    """Whether all that a message names belongs to its worker."""
    if isinstance(message, messages.Heartbeat):
        return set(message.nodes) <= set(record.nodes)
    if isinstance(message, messages.Hello):
        nodes = record.nodes
        ends = [
            edge.name
            for edge in edges(table.graph)
            if edge.consumer in nodes and edge.producer not in nodes
        ]
        return set(ends) == set(message.addresses) and set(message.lines) <= scaling.lines_of(
            table, nodes
        )
    return True


def _wire_all(table: Table) -> list[events.Command]:
    """Tell all where to send, as soon as each has said where it receives; then whoever is started
    again before the run begins.
    """
    inlets: dict[str, list[str]] = {}
    for edge, _, consumer in table.edges:
        inlets.setdefault(consumer, []).append(edge)
    if any(
        edge not in record.addresses
        for record in reversed(table)
        for edge in inlets.get(record.worker, ())
    ):
        return []
    unwired = [record for record in table if record.pid and not record.wired]
    by_edge: dict[str, list[str]] = {}
    for record in table:
        for edge, address in record.addresses.items():
            by_edge.setdefault(edge, []).append(address)
    begin = {
        worker: [name for name, producer, _ in table.edges if producer == worker]
        for worker in table.plan.workers
    }
    lines = {worker: scaling.read_by(table, own[0]) for worker, own in table.by_worker().items()}
    commands: list[events.Command] = []
    for record in unwired:
        if record.life.attempt:
            commands += scaling.hello(table, record)
            continue
        own = {edge: by_edge[edge] for edge in begin[record.worker] if edge in by_edge}
        commands.append(
            events.Send(record.name, messages.Wire(addresses=own, lines=lines[record.worker]))
        )
    return commands


def _heartbeat(
    table: Table, record: WorkerRecord, message: messages.Heartbeat
) -> list[events.Command]:
    record.heartbeat = message
    commands: list[events.Command] = [events.Send(record.name, messages.Heard())]
    if message.drained:
        commands += scaling.drained(table, record)
    if message.alone:
        return commands  # it ends because nobody spoke to it, not because anything is done
    for node, report in message.nodes.items():
        commands += _to_nodes(table, table.run.hear(node, report.status))
        if report.ended and table.all_ended(node):
            commands += _to_nodes(table, table.run.ended(node))
    return commands


def _to_nodes(table: Table, commands: list[messages.NodeCommand]) -> list[events.Command]:
    """Messages to all workers of a node that are at work; others hear what counts when they are."""
    return [
        events.Send(record.name, message)
        for message in commands
        for record in table
        if message.node in record.nodes and record.process is ProcessState.READY
    ]


# Processes


def _process(table: Table, event: events.ProcessEvent, now: float) -> list[events.Command]:
    record = table.workers.get(event.name)
    if record is None or not recovery.is_current(table, record, event.host):
        return []
    stopped_since, record.stopped_since = record.stopped_since, None
    if event.what == "started":
        record.has_process = True
    elif event.what == "stopped":
        record.stopped_since = now
    elif (
        event.what == "continued" and stopped_since is None and record.process is ProcessState.READY
    ):
        return [
            events.FaultRecovered(record.name, f"worker {record.name} {STOPPED}, and was let go on")
        ]
    elif event.what == "exited":
        torn = not all(host.is_alive for host in table.hosts_of(record))
        return recovery.exited(
            table, record, record.cause or recovery.how(event.status), now, with_host=torn
        )
    return []


def _forkserver_gone(table: Table) -> list[events.Command]:
    for record in table:
        record.has_process = False
    if table.is_closing:
        return []
    return [
        events.EndRun(
            WorkerDied(f"the forkserver ended unexpectedly; see logs in {table.folder}/logs")
        )
    ]


# Wishes and time


def _drain(table: Table, now: float) -> list[events.Command]:
    table.drains_until = now + table.limits.drain_s
    down = [record for record in table if record.process is ProcessState.DOWN]
    commands = _to_nodes(table, table.run.drain())
    return [command for record in down for command in recovery.give_up(table, record)] + commands


def _tick(table: Table, now: float) -> list[events.Command]:
    commands = _watch(table, now)
    recovery.progressed(table, table.run.progress, now)
    due = recovery.restart(table, now)
    commands += [
        events.StartWorker(name=record.name, senders=scaling.senders(table, record))
        for record in due
    ]
    while table.schedule and table.schedule[0][0] <= table.run.step and not table.is_ending:
        wishes = table.schedule.pop(0)[1]
        try:  # what has no room beside what else was wished is only told
            scaling.check(table, wishes)
            commands += scaling.wish(table, wishes)
        except GraphError as error:
            commands.append(events.NotifyUser(str(error)))
    # what was in their way may end without an event: a host is met, say
    if table.wishes and not table.is_ending:
        commands += scaling.advance(table)
    return commands


def _watch(table: Table, now: float) -> list[events.Command]:
    """Find workers that stand still or hang, and what takes too long."""
    before, table.watched_at = table.watched_at, now
    # the scheduler itself, and perhaps the workers with it
    was_stopped = now - before > table.limits.hang_s
    commands = recovery.watch_hosts(table, now, was_stopped=was_stopped)
    for record in table:
        if was_stopped:
            record.heard_at = now
        commands += recovery.wake(table, record, now)
        cause = recovery.overdue(table, record, now)
        if cause is not None:
            commands += recovery.kill(table, record, cause, now)
    error: DeadlineError | None = None
    if not table.begun and now > table.starts_until:
        late = [record.name for record in table if record.process is not ProcessState.READY]
        error = starts_too_long(table.limits, table.folder, late)
    if table.run.draining and not table.run.over and now > table.drains_until:
        error = drains_too_long(table.limits, table.folder)
    newcomer = table.joining
    if newcomer is not None and now > table.joins_until:
        error = joins_too_long(
            table.limits, table.folder, newcomer.name, scaling.missing(table, newcomer)
        )
    return commands if error is None else [*commands, events.EndRun(error)]
