"""Who joins and who leaves while a run goes on, whom to tell, in which order: a policy over the
table.

A join: a process is forked and says hello with its addresses; everybody downstream confirms that it
expects one sender more; the newcomer is wired; once it is ready it is started, and everybody
upstream is told to send to it too. A leave: everybody upstream lets go of the youngest replica,
whose input so ends. It finishes what it has, ends its outlets, and is stopped when all it sent is
acknowledged and upstream knows the same of what it got.

One join at a time, and no leave begins during one: so a newcomer's neighbours are the same from its
fork to its start.

A worker that died is started again in the membership it had. Its senders send again what it did not
acknowledge, a leaver leaves once it has that; and while somebody is away, no join and no leave
begins.
"""

from collections.abc import Collection, Iterable, Mapping

from dataflow.errors import GraphError, nearest
from dataflow.planning.gpu_groups import check_scaled
from dataflow.planning.seats import Seat
from dataflow.scheduler import seating
from dataflow.scheduler.events import Command, NotifyUser, Send, StartWorker
from dataflow.scheduler.table import Membership, ProcessState, Table, WorkerRecord
from dataflow.structure import line_of, refreshes_of
from dataflow.worker.messages import (
    AddReceivers,
    Expect,
    Hello,
    Moved,
    RetireReceivers,
    SenderEnded,
    Start,
    Stop,
    WeightLine,
    Wire,
)


def replicas(table: Table, node: str) -> dict[str, int]:
    """How many replicas of a node are joining, live, leaving."""
    worker = table.plan.placements[node].worker
    memberships = [record.membership for record in table if record.worker == worker]
    return {
        "joining": memberships.count(Membership.JOINING),
        "live": memberships.count(Membership.LIVE),
        "leaving": memberships.count(Membership.LEAVING) + memberships.count(Membership.STOPPING),
    }


def check(table: Table, wishes: Mapping[str, int]) -> None:
    """Raise GraphError for an unknown node, and for a number of replicas that a node cannot
    have.
    """
    operators = table.graph.operators
    for node, count in wishes.items():
        if node not in operators:
            raise GraphError(
                f"replicas are asked for '{node}', but the graph has"
                f" {list(operators)}{nearest(node, operators)}; name one of these"
            )
        check_scaled(operators[node], count, table.plan.placements[node].replicas)
        most = seating.most(table, node)
        if most is not None and count > most:
            raise GraphError(
                f"'{node}' is to have {count} replicas of {table.plan.placements[node].share} each,"
                f" but {table.plan.devices.gpus} GPUs have room for {most} beside the others; ask"
                f" for {most} at most"
            )


def missing(table: Table, newcomer: WorkerRecord) -> str:
    """What a joining newcomer waits for, as text."""
    if newcomer.process is not ProcessState.STARTING:
        return "its process to say hello"
    waited = sorted(set(newcomer.unconfirmed.values()))
    return f"{', '.join(waited)} to expect it" if waited else "its operator to be built"


# What happens


def wish(table: Table, wishes: Mapping[str, int]) -> list[Command]:
    """Accept a wish for replicas of some nodes, which `check` allowed."""
    table.wishes |= wishes
    return advance(table)


def fell(table: Table, record: WorkerRecord) -> list[Command]:
    """A worker died that was not told to stop, and will be started again."""
    record.drained = record.wired = record.may_miss_ends = False
    workers = table.workers
    record.senders = {
        sender for sender in record.senders if workers[sender].membership is not Membership.LEFT
    }
    for receiver in table:
        if receiver.membership is Membership.JOINING and receiver is not record:
            # The next attempt is started with the right number of senders.
            receiver.unconfirmed = {
                ticket: sender
                for ticket, sender in receiver.unconfirmed.items()
                if sender != record.name
            }
    return _wire(table)


def senders(table: Table, record: WorkerRecord) -> dict[str, int]:
    """By edge that ends at a worker which died: how many senders its next attempt is to expect."""
    return {
        edge: sum(table.workers[sender].worker == producer for sender in record.senders)
        for edge, producer, consumer in table.edges
        if consumer == record.worker
    }


def hello(table: Table, record: WorkerRecord) -> list[Command]:
    """A newcomer, or one that died, has told where it receives."""
    return _wire(table) if record.membership is Membership.JOINING else _wire_again(table, record)


def confirmed(table: Table, ticket: int) -> list[Command]:
    """A worker has done what the message with this ticket asked."""
    commands: list[Command] = []
    for record in table:
        sender = record.unconfirmed.pop(ticket, None)
        if sender is not None and record.membership is Membership.LEAVING and record.may_miss_ends:
            commands.append(_ended(table, record, sender))
    return commands + _wire(table) + _stop(table)


def ready(table: Table, record: WorkerRecord) -> list[Command]:
    """A worker is built and wired: it starts, and a newcomer gets its share of the rows from now
    on.
    """
    commands: list[Command] = [Send(record.name, Start())]
    if record.membership is Membership.JOINING:
        record.membership = Membership.LIVE
        commands += [_add(table, sender, record) for sender in sorted(record.senders)]
        commands.append(
            NotifyUser(
                f"'{record.name}' has joined with {table.plan.placements[record.worker].share}"
            )
        )
    return commands + advance(table)


def drained(table: Table, record: WorkerRecord) -> list[Command]:
    """A worker's loops have ended, and all they sent is acknowledged."""
    record.drained = True
    return _stop(table)


def exited(table: Table, record: WorkerRecord) -> list[Command]:
    """A worker that was told to stop has ended, however it did."""
    record.membership = Membership.LEFT
    for receiver in table:
        receiver.unconfirmed = {
            ticket: sender
            for ticket, sender in receiver.unconfirmed.items()
            if sender != record.name
        }
    return [
        NotifyUser(f"'{record.name}' has left; all it had was sent on"),
        *_stop(table),
        *advance(table),
    ]


def advance(table: Table) -> list[Command]:
    """Begin all wishes that may begin now."""
    commands: list[Command] = []
    for node, count in list(table.wishes.items()):
        if not table.begun or table.joining is not None or anybody_away(table):
            break
        live = [
            mate for mate in table if mate.worker == node and mate.membership is Membership.LIVE
        ]
        for record in sorted(live, key=lambda each: each.replica)[count:]:
            commands += _leave(table, record)
        place = seating.room_for(table, node)
        if len(live) >= count:
            del table.wishes[node]
        elif place is not None:
            commands += _join(table, node, place)
    return commands


def anybody_away(table: Table) -> bool:
    """Whether some worker has died, and is not ready again."""
    return any(record.is_away for record in table)


def repeat(table: Table) -> list[Command]:
    """Repeat what an earlier scheduler decided, and perhaps did not say: twice does no harm."""
    commands = [command for record in table for command in told_again(table, record)]
    for record in table:
        for ticket, partner in record.unconfirmed.items():
            if record.membership is Membership.JOINING:
                commands.append(_expect(table, record, table.workers[partner], ticket))
            else:
                commands.append(_retire(table, partner, record, ticket))
        if record.membership is Membership.LIVE:
            commands += [_add(table, sender, record) for sender in sorted(record.senders)]
        if record.membership is Membership.LEAVING:
            record.may_miss_ends = True
            commands += _ends_told(table, record)
        if record.membership is Membership.STOPPING:
            commands.append(Send(record.name, Stop()))
    return commands


# Steps of a join and of a leave


def _join(table: Table, node: str, seat: Seat) -> list[Command]:
    replica = 1 + max(record.replica for record in table if record.worker == node)
    live = [record for record in table if record.membership is Membership.LIVE]
    newcomer = WorkerRecord(
        name=f"{node}-{replica}",
        worker=node,
        replica=replica,
        nodes=tuple(table.plan.workers[node]),
        host=seat.host,
        gpus=seat.gpus,
        membership=Membership.JOINING,
    )
    newcomer.senders = {mate.name for mate in live if mate.worker in table.upstream(newcomer)}
    table.add(newcomer)
    commands: list[Command] = [StartWorker(name=newcomer.name, senders=senders(table, newcomer))]
    for receiver in live:
        if any(
            (producer, consumer) == (node, receiver.worker) for _, producer, consumer in table.edges
        ):
            receiver.senders.add(newcomer.name)
            commands.append(
                _expect(table, newcomer, receiver, _ticket(table, newcomer, receiver.name))
            )
    return commands


def _wire(table: Table) -> list[Command]:
    """Wire the newcomer, once, when it has said hello and is expected."""
    newcomer = table.joining
    if (
        newcomer is None
        or newcomer.wired
        or newcomer.unconfirmed
        or newcomer.process is not ProcessState.STARTING
    ):
        return []
    newcomer.wired = True
    receivers: dict[str, list[str]] = {}
    for record in table:
        if newcomer.name in record.senders:
            for edge, address in _inlets(table, record, newcomer).items():
                receivers.setdefault(edge, []).append(address)
    return [Send(newcomer.name, Wire(addresses=receivers, lines=read_by(table, newcomer)))]


def _wire_again(table: Table, record: WorkerRecord) -> list[Command]:
    """Where one that died sends to; of a leaver only one that it had not let go, which it does at
    once.
    """
    record.wired = record.may_miss_ends = True
    receivers: dict[str, list[str]] = {}
    commands: list[Command] = []
    for receiver in table:
        tickets = [
            ticket for ticket, sender in receiver.unconfirmed.items() if sender == record.name
        ]
        leaves = receiver.membership is Membership.LEAVING and bool(tickets)
        if record.name in receiver.senders and (receiver.membership is Membership.LIVE or leaves):
            for edge, address in _inlets(table, receiver, record).items():
                receivers.setdefault(edge, []).append(address)
            if leaves:
                commands.append(_retire(table, record.name, receiver, tickets[0]))
    if record.membership is Membership.LEAVING:
        commands += _ends_told(table, record)
    for sender in sorted(record.senders):
        if table.workers[sender].may_end:  # it may come once more, or not: so it counts by its name
            commands.append(_ended(table, record, sender))
    return [
        Send(record.name, Wire(addresses=receivers, lines=read_by(table, record))),
        *commands,
    ]


def _ends_told(table: Table, leaver: WorkerRecord) -> list[Command]:
    """The senders that have let a leaver go, which it may not know."""
    return [
        _ended(table, leaver, sender)
        for sender in sorted(leaver.senders - set(leaver.unconfirmed.values()))
    ]


def _leave(table: Table, record: WorkerRecord) -> list[Command]:
    record.membership = Membership.LEAVING
    return [
        _retire(table, sender, record, _ticket(table, record, sender))
        for sender in sorted(record.senders)
        if table.workers[sender].membership is not Membership.LEFT
    ]


def _stop(table: Table) -> list[Command]:
    """Stop the leavers that have nothing left, and of which upstream knows it."""
    commands: list[Command] = []
    for record in table:
        if record.membership is Membership.LEAVING and record.drained and not record.unconfirmed:
            record.membership = Membership.STOPPING
            commands += [
                _ended(table, receiver, record.name)
                for receiver in table
                if record.name in receiver.senders
                and receiver.may_miss_ends
                and receiver.membership is not Membership.LEFT
            ]
            commands.append(Send(record.name, Stop()))
    return commands


# Messages


def _add(table: Table, sender: str, receiver: WorkerRecord) -> Send:
    return Send(sender, AddReceivers(receivers=_inlets(table, receiver, table.workers[sender])))


def _retire(table: Table, sender: str, leaver: WorkerRecord, ticket: int) -> Send:
    inlets = _inlets(table, leaver, table.workers[sender])
    return Send(sender, RetireReceivers(receivers=inlets, ticket=ticket))


def _expect(table: Table, newcomer: WorkerRecord, receiver: WorkerRecord, ticket: int) -> Send:
    """Tell a receiver how many senders it has had in all, the newcomer included."""
    ever = sum(table.workers[sender].worker == newcomer.worker for sender in receiver.senders)
    own = _between(table, newcomer, receiver)
    return Send(receiver.name, Expect(senders=dict.fromkeys(own, ever), ticket=ticket))


def _ended(table: Table, receiver: WorkerRecord, sender: str) -> Send:
    """Tell a receiver that a sender has told it the end, perhaps in the attempt before: it need not
    wait for that.
    """
    own = table.workers[sender]
    return Send(
        receiver.name,
        SenderEnded(senders=dict.fromkeys(_between(table, own, receiver), own.replica)),
    )


def _inlets(table: Table, receiver: WorkerRecord, sender: WorkerRecord) -> dict[str, str]:
    """Where a worker receives what another one sends, by edge."""
    return {edge: receiver.addresses[edge] for edge in _between(table, sender, receiver)}


def _between(table: Table, sender: WorkerRecord, receiver: WorkerRecord) -> list[str]:
    """The edges from one to the other."""
    ends = (sender.worker, receiver.worker)
    return [edge for edge, producer, consumer in table.edges if (producer, consumer) == ends]


def _ticket(table: Table, record: WorkerRecord, confirms: str) -> int:
    table.last_ticket += 1
    record.unconfirmed[table.last_ticket] = confirms
    return table.last_ticket


# Where workers listen, and who is told when one that was started again does so elsewhere: a policy
# over the table. `Wire` tells each attempt where all whom it sends to, and whose weights it reads,
# listened last. Whoever was wired before they moved hears `Moved`; who is away meanwhile hears it
# with its own `Wire`.


def listens(table: Table, record: WorkerRecord, hello: Hello) -> list[Command]:
    """Note where an attempt listens, and tell all who knew its worker elsewhere."""
    moved = {
        edge
        for edge, address in hello.addresses.items()
        if record.addresses.get(edge, address) != address
    }
    for edge in moved:
        ever = {*record.left.get(edge, ()), record.addresses[edge]}
        record.left[edge] = sorted(ever - {hello.addresses[edge]})
    lines = {
        name: line for name, line in hello.lines.items() if record.lines.get(name, line) != line
    }
    record.addresses, record.lines, record.received_at = hello.addresses, hello.lines, record.host
    return _tell(table, record, moved, lines)


def told_again(table: Table, record: WorkerRecord) -> list[Command]:
    """Repeat what an earlier scheduler found of a worker that moved, and perhaps did not say: twice
    does no harm.
    """
    lines = {name: line for name, line in record.lines.items() if line.host}
    return _tell(table, record, set(record.left), lines)


def read_by(table: Table, reader: WorkerRecord) -> dict[str, WeightLine]:
    """The weight lines that a worker reads, where they are now."""
    lines: dict[str, WeightLine] = {}
    for name, trainer in _lines_read(table, reader).items():
        record = table.workers.get(f"{table.plan.placements[trainer].worker}-0")
        if record is not None and name in record.lines:
            lines[name] = record.lines[name]
    return lines


def lines_of(table: Table, nodes: Iterable[str]) -> set[str]:
    """Names of the weight lines of some nodes."""
    graph = table.graph
    return {
        line_of(graph, node, refresh)
        for node in nodes
        for refresh in (None, *refreshes_of(graph, node))
    }


def _tell(
    table: Table, record: WorkerRecord, moved: Collection[str], lines: Mapping[str, WeightLine]
) -> list[Command]:
    producers = {edge: producer for edge, producer, _ in table.edges}
    commands: list[Command] = []
    for other_record in table if moved or lines else ():
        if other_record.membership is Membership.LEFT or other_record is record:
            continue
        own = [
            edge
            for edge in sorted(moved)
            if other_record.name in record.senders and producers[edge] == other_record.worker
        ]
        read = {
            name: line for name, line in lines.items() if name in _lines_read(table, other_record)
        }
        if own or read:
            commands.append(
                Send(
                    other_record.name,
                    Moved(
                        receivers={edge: record.addresses[edge] for edge in own},
                        before={edge: record.left[edge] for edge in own},
                        lines=read,
                    ),
                )
            )
    return commands


def _lines_read(table: Table, record: WorkerRecord) -> dict[str, str]:
    """The trainer of each line, by the line's name."""
    read = [feedback for feedback in table.graph.feedbacks if feedback.reader.name in record.nodes]
    trainers = [(feedback.weights.trainer.name, feedback.refresh) for feedback in read]
    return {line_of(table.graph, trainer, refresh): trainer for trainer, refresh in trainers}
