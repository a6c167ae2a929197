"""Where workers listen, and who is told when one that was started again does so elsewhere: a policy
over the table.

`Wire` tells each attempt where all whom it sends to, and whose weights it reads, listened last.
Whoever was wired before they moved hears `Moved`; who is away meanwhile hears it with its own
`Wire`.
"""

from collections.abc import Collection, Iterable, Mapping

from dataflow.scheduler.events import Command, Send
from dataflow.scheduler.table import Membership, Table, WorkerRecord
from dataflow.structure import line_of, refreshes_of
from dataflow.worker.messages import Hello, Moved, WeightLine


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
