"""Knobs of a live run: which may change, what is recorded of a change, who hears of it; a policy
over the table.

All workers hear of all changes, and each acts on those that concern it; what was sent to one that
is just starting is said again when it is ready, and a change that is known is known. A scorer's
worker starts again, as for a swap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dataflow.errors import RunError
from dataflow.folder.live_changes import MAX_STALENESS, KnobChange, Swap, latest_swaps, of_operators
from dataflow.graph import Graph
from dataflow.planning.set_values import placed, settable_of
from dataflow.scheduler.events import Command, Send
from dataflow.scheduler.swaps import policy
from dataflow.scheduler.table import Life, Table, WorkerRecord
from dataflow.scorer import Scorer
from dataflow.settable import Settable, fitted, plain_value
from dataflow.structure import Structure, leading
from dataflow.worker.changed_knobs import changed
from dataflow.worker.messages import ChangeKnobs


def planned(table: Table, wishes: Mapping[str, Any], by: str, at: float) -> tuple[KnobChange, ...]:
    """The changes that somebody wishes for, by NODE.KNOB, checked against the graph as it is now.

    Errors: GraphError, RunError.
    """
    if table.is_ending or not table.begun:
        raise RunError(
            f"the run is {'ending' if table.is_ending else 'starting'}; set knobs while it is at"
            " work"
        )
    graph = changed(table.graph, of_operators(table.changes, ()))
    knobs_of = partial(_knobs_of, table)
    number = max((change.number for change in table.changes), default=0)
    changes: list[KnobChange] = []
    for place, value in wishes.items():
        node, knob = placed(graph, place, knobs_of)
        before, swap = knobs_of(graph, node)[knob], _swap_of(table, node)
        changes.append(
            KnobChange(
                number=number + len(changes) + 1,
                node=node,
                knob=knob,
                was=plain_value(before.value),
                value=plain_value(before.taken(value, node, knob) if swap else value),
                trainer=_trainer(graph, node, knob),
                asked=table.run.step,
                at=at,
                by=by,
                swap=swap.number if swap else 0,
            )
        )
    # as a whole: what holds together may not hold one by one
    changed_graph = changed(graph, of_operators(changes, ()))
    for index, change in enumerate(changes):
        if not change.swap:
            changes[index] = replace(
                change,
                value=plain_value(settable_of(changed_graph, change.node)[change.knob].value),
            )
    for record in _scorers(table, changes):
        if table.swaps.worker or record.life is not Life.READY:
            raise RunError(
                f"'{record.name}', which is to start again with it, is {record.state}; ask again in"
                " a moment"
            )
    return tuple(changes)


def begin(table: Table, changes: Sequence[KnobChange], now: float) -> list[Command]:
    """Changes that are checked count from here on."""
    table.changes = [*table.changes, *changes]
    commands = [command for record in table for command in tell(table, record)]
    return commands + [
        command for record in _scorers(table, changes) for command in policy.end(record, now)
    ]


def tell(table: Table, record: WorkerRecord) -> list[Command]:
    """Tell a worker the changes that it may have missed."""
    if not table.changes or not record.is_live:
        return []
    return [Send(record.name, ChangeKnobs(changes=tuple(table.changes)))]


def late(table: Table, number: int) -> list[str]:
    """Workers that have not applied the change with this number yet."""
    return [
        record.name
        for record in table
        if record.life is not Life.GONE
        and (record.heartbeat is None or record.heartbeat.changed < number)
    ]


def _swap_of(table: Table, node: str) -> Swap | None:
    """The swap by which the node's operator is in place; None: the declared operator."""
    return next((swap for swap in latest_swaps(table.swaps.made) if swap.node == node), None)


def _knobs_of(table: Table, graph: Structure, node: str) -> Mapping[str, Settable]:
    """Knobs of a node that may change, with the values in force. What was swapped in this process
    does not import: it goes by what the trial found.
    """
    if (swap := _swap_of(table, node)) is None:
        return settable_of(graph, node)
    values = {
        change.knob: change.value
        for change in of_operators(table.changes, [swap])
        if change.node == node
    }
    return {
        knob: replace(settable, value=fitted(values.get(knob, settable.value), settable.kind))
        for knob, settable in swap.settable().items()
    }


def _scorers(table: Table, changes: Sequence[KnobChange]) -> list[WorkerRecord]:
    """Workers that start again for these changes."""
    nodes = {
        change.node for change in changes if isinstance(table.graph.operators[change.node], Scorer)
    }
    return [record for record in table if nodes & set(record.nodes)]


def _trainer(graph: Graph, node: str, knob: str) -> str:
    """The trainer whose steps a change counts by."""
    if graph.operators[node].trains:
        return node
    for feedback in graph.feedbacks:
        if knob == MAX_STALENESS and feedback.reader.name == node:
            return feedback.weights.trainer.name
    return next(iter(leading(graph)), "")
