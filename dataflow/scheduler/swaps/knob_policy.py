"""Knobs of a live run: which may change, what is recorded of a change, who hears of it; a policy over the table.

All workers hear of all changes, and each acts on those that concern it; what was sent to one that is just starting is
said again when it is ready, and a change that is known is known. A scorer's worker starts again, as for a swap.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.errors import GraphError, RunError
from dataflow.folder.knob_changes import MAX_STALENESS, KnobChange
from dataflow.graph import Graph
from dataflow.planning.set_values import placed, settable_of
from dataflow.scheduler.events import Command, Send
from dataflow.scheduler.swaps import policy
from dataflow.scheduler.table import Life, Table, WorkerRecord
from dataflow.scorer import Scorer
from dataflow.settable import plain_value
from dataflow.structure import leading
from dataflow.worker.changed_knobs import changed
from dataflow.worker.messages import ChangeKnobs


def planned(table: Table, wishes: Mapping[str, Any], by: str, at: float) -> tuple[KnobChange, ...]:
    """The changes that somebody wishes for, by NODE.KNOB, checked against the graph as it is now.

    Errors: GraphError, RunError."""
    if table.is_ending or not table.begun:
        raise RunError(f"the run is {'ending' if table.is_ending else 'starting'}; set knobs while it is at work")
    graph = changed(table.graph, table.changes)
    found: list[KnobChange] = []
    for place, value in wishes.items():
        node, knob = placed(graph, place)
        if any(swap.node == node for swap in table.swaps.made):
            raise GraphError(
                f"'{node}' is an operator that was swapped in, and its knobs are those that it has itself; swap it "
                f"for one with {knob}={value!r}"
            )
        before = settable_of(graph, node)[knob].value
        number = max((each.number for each in table.changes), default=0) + len(found) + 1
        found.append(KnobChange(
            number=number, node=node, knob=knob, value=plain_value(value), was=plain_value(before),
            trainer=_trainer(graph, node, knob), asked=table.run.step, at=at, by=by,
        ))  # fmt: skip
    made = changed(graph, found)  # as a whole: what holds together may not hold one by one
    for number, each in enumerate(found):
        value = plain_value(settable_of(made, each.node)[each.knob].value)
        found[number] = KnobChange(**{**vars(each), "value": value})
    for record in _scorers(table, found):
        if table.swaps.worker or record.life is not Life.READY:
            raise RunError(
                f"'{record.name}', which is to start again with it, is {record.state}; ask again in a moment"
            )
    return tuple(found)


def begin(table: Table, changes: Sequence[KnobChange], now: float) -> list[Command]:
    """Changes that are checked count from here on."""
    table.changes = [*table.changes, *changes]
    commands = [command for record in table for command in tell(table, record)]
    return commands + [command for record in _scorers(table, changes) for command in policy.end(record, now)]


def tell(table: Table, record: WorkerRecord) -> list[Command]:
    """What a worker has to know that may have missed some."""
    if not table.changes or not record.is_live:
        return []
    return [Send(record.name, ChangeKnobs(changes=tuple(table.changes)))]


def late(table: Table, number: int) -> list[str]:
    """Workers that do not go by the change with this number yet."""
    return [
        record.name for record in table
        if record.life is not Life.GONE and (record.heartbeat is None or record.heartbeat.changed < number)
    ]  # fmt: skip


def _scorers(table: Table, changes: Sequence[KnobChange]) -> list[WorkerRecord]:
    """Workers that start again for these."""
    nodes = {each.node for each in changes if isinstance(table.graph.operators[each.node], Scorer)}
    return [record for record in table if nodes & set(record.nodes)]


def _trainer(graph: Graph, node: str, knob: str) -> str:
    """Whose steps a change counts by."""
    if graph.operators[node].trains:
        return node
    for feedback in graph.feedbacks:
        if knob == MAX_STALENESS and feedback.reader.name == node:
            return feedback.weights.trainer.name
    return next(iter(leading(graph)), "")
