"""The data edges of a planned graph as values: who sends which rows to whom, how much may be under way."""

from dataclasses import dataclass
from typing import Any

from dataflow.check import group_size
from dataflow.graph import Graph
from dataflow.node import Bound, Generate, Learn, Operator
from dataflow.plan import Plan, bounds_of
from dataflow.records import Columns
from dataflow.stream import Stream

CAPACITY_BYTES = 256 << 20
_CAPACITY_ROWS = 4096
_PROMPTS = 128
_TOGETHER = 8


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One data edge of one lane."""

    producer: str
    consumer: str
    lane: str
    columns: Columns
    capacity_rows: int
    """Rows that may be sent and not yet acknowledged, for each receiver."""
    batch_rows: int = 1024
    """Most rows that travel together, where a single group has no more."""

    @property
    def name(self) -> str:
        """What errors and headers call it."""
        return f"{self.producer}>{self.consumer}:{self.lane}"


def edges(graph: Graph) -> list[Edge]:
    """All data edges, in the order in which they were declared."""
    bounds = bounds_of(graph)
    return [
        _prompts(graph, stream, call.operator, bounds.get(stream.lane))
        if isinstance(call.operator, Generate)
        else _rows(graph, stream, call.operator)
        for call in graph.calls for stream in call.inputs
    ]  # fmt: skip


def _prompts(graph: Graph, stream: Stream[Any], generator: Operator, bound: Bound | None) -> Edge:
    """Prompts are few and cheap to hold back.

    A replica gets no more of them than may be in flight, and a step's worth to go on with, and a step's prompts travel
    in several batches: so that all replicas share in every step, and one that joins soon does.
    """
    in_flight = _PROMPTS if bound is None else (bound.max_staleness + 2) * bound.prompts_per_step
    together = _TOGETHER if bound is None else min(_TOGETHER, bound.prompts_per_step // _TOGETHER)
    return Edge(
        producer=stream.node, consumer=generator.name, lane=stream.lane, columns=stream.columns,
        capacity_rows=min(_PROMPTS, in_flight), batch_rows=max(1, together),
    )  # fmt: skip


def _rows(graph: Graph, stream: Stream[Any], consumer: Operator) -> Edge:
    """A trainer acknowledges a group when its step is committed, so its edge must hold all that the staleness bound
    lets be in flight, and a step more: with less the run would deadlock.
    """
    size = group_size(graph, stream.lane) or 1
    capacity = max(_CAPACITY_ROWS, 2 * size)
    if isinstance(consumer, Learn):
        ahead = max((f.max_staleness for f in graph.feedbacks if f.weights.trainer is consumer), default=1)
        capacity = max(_CAPACITY_ROWS, (ahead + 2) * consumer.step_prompts * size)
    return Edge(
        producer=stream.node, consumer=consumer.name, lane=stream.lane, columns=stream.columns, capacity_rows=capacity
    )


def context_facts(graph: Graph, plan: Plan, node: str) -> dict[str, object]:
    """What a node's Context says of the graph around it."""
    operator = graph.operators[node]
    columns: dict[str, Columns] = {}
    origins: dict[str, tuple[str, ...]] = {}
    for edge in edges(graph):
        if edge.consumer == node:
            columns.setdefault(edge.lane, edge.columns)
            origins[edge.lane] = (*origins.get(edge.lane, ()), edge.producer)
    bounds: dict[str, Bound] = dict(plan.bounds)
    trainers = [feedback.weights.trainer.name for feedback in graph.feedbacks if feedback.reader.name == node]
    return {
        "node": node, "columns": columns, "origins": origins, "bounds": bounds,
        "on_demand": operator.name in plan.on_demand, "threads": plan.placements[node].threads,
        "replicas": plan.placements[node].replicas, "narrow": narrow_format(graph, trainers[0]) if trainers else None,
    }  # fmt: skip


def readers_of(graph: Graph, trainer: str) -> list[Operator]:
    """The operators that take a trainer's weights."""
    return [feedback.reader for feedback in graph.feedbacks if feedback.weights.trainer.name == trainer]


def narrow_format(graph: Graph, trainer: str) -> str | None:
    """The narrow format that all readers of a trainer want; None, full tensors, where one wants another or none."""
    wanted = {reader.narrow for reader in readers_of(graph, trainer)}
    return wanted.pop() if len(wanted) == 1 else None


def marks(graph: Graph, node: str, lane: str) -> str | None:
    """The ledger state that rows leaving `node` have reached; None where the next node will say so itself."""
    state = graph.operators[node].state
    readers = [edge.consumer for edge in edges(graph) if edge.producer == node and edge.lane == lane]
    if state == "issued" or any(graph.operators[reader].state == state for reader in readers):
        return None
    return state
