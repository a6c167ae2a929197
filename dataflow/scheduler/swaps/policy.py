"""One operator in the place of another while a run goes on: a policy over the table.

The node's worker is ended, and started again with the new operator as if it had died: its senders
send again what it did not acknowledge, receivers know what comes twice by its group. It is no
fault: nothing is counted, and there is no pause. A worker that cannot be built with the new
operator is started with the one before.
"""

import signal

from dataflow.errors import GraphError, RunError, nearest
from dataflow.folder.live_changes import Swap, latest_swaps
from dataflow.node import Generate, Learn, Operator, Source
from dataflow.scheduler.events import Command, NotifyUser, Signal
from dataflow.scheduler.recovery import ENDED
from dataflow.scheduler.table import Life, Table, WorkerRecord
from dataflow.scorer import Scorer
from dataflow.worker.messages import Failed

_CAUSE = f"{ENDED} start with another operator"


def check(table: Table, node: str) -> None:
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
    if not table.begun or record.life is not Life.READY:
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


def begin(table: Table, swap: Swap, now: float) -> list[Command]:
    """An operator that fits takes the place of another one: the worker ends."""
    record = worker_of(table, swap.node)
    table.swaps.made = [*latest_swaps(table.swaps.made), swap]
    table.swaps.worker, table.swaps.taken_back = record.name, ""
    return end(record, now)


def failed(table: Table, record: WorkerRecord, message: Failed, now: float) -> list[Command] | None:
    """A worker could not be built: where that is for a swap, it is taken back; None: it is not."""
    if table.swaps.worker != record.name or record.life is Life.READY or table.swaps.taken_back:
        return None
    swap = table.swaps.made.pop()
    table.swaps.taken_back = (
        f"'{record.name}' could not start with '{swap.reference}': {message.message}"
    )
    return end(record, now)


def ready(table: Table, record: WorkerRecord) -> list[Command]:
    """A worker is at work again."""
    if table.swaps.worker != record.name:
        return []
    table.swaps.worker = ""
    if table.swaps.taken_back:
        return [NotifyUser(f"{table.swaps.taken_back}; it goes on with the operator before")]
    return [NotifyUser(told(table.swaps.made[-1]))]


def told(swap: Swap) -> str:
    """The outcome, as text."""
    return (
        f"'{swap.node}' is '{swap.reference}' from now on (sha256 {swap.digest[:12]}), after step"
        f" {swap.step}"
    )


def end(record: WorkerRecord, now: float) -> list[Command]:
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
