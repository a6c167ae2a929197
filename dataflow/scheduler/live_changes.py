"""Changes to a live run: one operator in the place of another, and other values of knobs. A policy
over the table.

A scorer's worker is ended, and started again with the new operator or the new knobs as if it had
died: its senders send again what it did not acknowledge, receivers know what comes twice by its
group. It is no fault: nothing is counted, and there is no pause. A worker that cannot be built with
the new operator is started with the one before.

All workers hear of all changes of knobs, and each acts on those that concern it; what was sent to
one that is just starting is said again when it is ready, and a change that is known is known.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dataflow.errors import GraphError, RunError, nearest
from dataflow.folder.live_changes import MAX_STALENESS, KnobChange, Swap, latest_swaps, of_operators
from dataflow.graph import Graph
from dataflow.node import Generate, Learn, Operator, Source
from dataflow.planning.set_values import placed, settable_of
from dataflow.scheduler.events import Command, NotifyUser, Send, Signal
from dataflow.scheduler.table import ENDED, ProcessState, Table, WorkerRecord
from dataflow.scorer import Scorer
from dataflow.settable import Settable, fitted, plain_value
from dataflow.structure import Structure, leading
from dataflow.worker.changed_knobs import changed
from dataflow.worker.messages import ChangeKnobs, Failed

_CAUSE = f"{ENDED} start with another operator"


def check_swap(table: Table, node: str) -> None:
    """Refuse a swap that cannot be, as far as the graph and the workers tell. Errors: GraphError,
    RunError.
    """
    operators = table.graph.operators
    if node not in operators:
        raise GraphError(
            f"'{node}' is to be swapped, but the graph has"
            f" {list(operators)}{nearest(node, operators)}; name one of these"
        )
    if not isinstance(operators[node], Scorer):
        can = [name for name, operator in operators.items() if isinstance(operator, Scorer)]
        raise GraphError(
            f"'{node}' {_why_not(operators[node])}, and a live run swaps scorers and filters alone,"
            f" here {can}; end it with dataflow stop, and start another run, from its last"
            " checkpoint if you like"
        )
    if table.is_ending:
        raise RunError(
            f"the run is ending, and another '{node}' would come too late; start another run"
        )
    if table.swaps.worker:
        raise RunError(
            f"'{table.swaps.worker}' is just being started with another operator; ask again when it"
            " is ready"
        )
    record = worker_of(table, node)
    if not table.begun or record.process is not ProcessState.READY:
        raise RunError(
            f"'{record.name}', which runs '{node}', is {record.state} and not at work; ask again in"
            " a moment"
        )


def worker_of(table: Table, node: str) -> WorkerRecord:
    """The process that runs a scorer, of which there is one."""
    return next(record for record in table if node in record.nodes)


def own(table: Table, record: WorkerRecord) -> tuple[Swap, ...]:
    """What an attempt of a worker that starts now runs in the place of its graph's operators."""
    return tuple(swap for swap in latest_swaps(table.swaps.made) if swap.node in record.nodes)


def begin_swap(table: Table, swap: Swap, now: float) -> list[Command]:
    """An operator that fits takes the place of another one: the worker ends."""
    record = worker_of(table, swap.node)
    table.swaps.made = [*latest_swaps(table.swaps.made), swap]
    table.swaps.worker, table.swaps.taken_back = record.name, ""
    return end_to_change(record, now)


def swap_failed(
    table: Table, record: WorkerRecord, message: Failed, now: float
) -> list[Command] | None:
    """A worker could not be built: where that is for a swap, it is taken back; None: it is not."""
    if (
        table.swaps.worker != record.name
        or record.process is ProcessState.READY
        or table.swaps.taken_back
    ):
        return None
    swap = table.swaps.made.pop()
    table.swaps.taken_back = (
        f"'{record.name}' could not start with '{swap.reference}': {message.message}"
    )
    return end_to_change(record, now)


def swap_ready(table: Table, record: WorkerRecord) -> list[Command]:
    """A worker is at work again."""
    if table.swaps.worker != record.name:
        return []
    table.swaps.worker = ""
    if table.swaps.taken_back:
        return [NotifyUser(f"{table.swaps.taken_back}; it goes on with the operator before")]
    return [NotifyUser(swap_told(table.swaps.made[-1]))]


def swap_told(swap: Swap) -> str:
    """The outcome, as text."""
    return (
        f"'{swap.node}' is '{swap.reference}' from now on (sha256 {swap.digest[:12]}), after step"
        f" {swap.step}"
    )


def end_to_change(record: WorkerRecord, now: float) -> list[Command]:
    """End a worker; it starts again, and runs another operator from then on."""
    if not record.has_process:
        return []
    record.die(_CAUSE, now)
    return [Signal(record.name, signal.SIGKILL)]


def _why_not(operator: Operator) -> str:
    """Why no other operator could take its place, as text."""
    match operator:
        case Generate():
            return "generates: rollouts under way and the weights that drew them are its own"
        case Learn():
            return "trains: weights and the optimiser's state are its own"
        case Source():
            return (
                "is a source: which groups are issued, and in what order, is what the ledger"
                " counts by"
            )
        case Operator() if operator.uses is not None:
            return "computes with a model, whose weights other processes may send it"
        case _:
            return f"is a {type(operator).__name__}, which may hold what it was given earlier"


def plan_changes(
    table: Table, wishes: Mapping[str, Any], by: str, at: float
) -> tuple[KnobChange, ...]:
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
        if table.swaps.worker or record.process is not ProcessState.READY:
            raise RunError(
                f"'{record.name}', which is to start again with it, is {record.state}; ask again in"
                " a moment"
            )
    return tuple(changes)


def begin_changes(table: Table, changes: Sequence[KnobChange], now: float) -> list[Command]:
    """Changes that are checked count from here on."""
    table.changes = [*table.changes, *changes]
    commands = [command for record in table for command in tell_changes(table, record)]
    return commands + [
        command for record in _scorers(table, changes) for command in end_to_change(record, now)
    ]


def tell_changes(table: Table, record: WorkerRecord) -> list[Command]:
    """Tell a worker the changes that it may have missed."""
    if not table.changes or not record.is_live:
        return []
    return [Send(record.name, ChangeKnobs(changes=tuple(table.changes)))]


def late(table: Table, number: int) -> list[str]:
    """Workers that have not applied the change with this number yet."""
    return [
        record.name
        for record in table
        if record.process is not ProcessState.GONE
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
