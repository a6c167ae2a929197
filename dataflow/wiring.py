"""The data edges of a planned graph as values: who sends which rows to whom, how much may be under way."""

from dataclasses import dataclass

from dataflow.check import group_size
from dataflow.graph import Graph
from dataflow.node import Bound, Generate, Learn, Operator
from dataflow.plan import Plan
from dataflow.records import Columns

CAPACITY_BYTES = 256 << 20
_CAPACITY_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One data edge of one lane."""

    producer: str
    consumer: str
    lane: str
    columns: Columns
    capacity_rows: int
    """Rows that may be sent and not yet acknowledged, for each receiver."""

    @property
    def name(self) -> str:
        """What errors and headers call it."""
        return f"{self.producer}>{self.consumer}:{self.lane}"


def edges(graph: Graph) -> list[Edge]:
    """All data edges, in the order in which they were declared."""
    found = []
    for call in graph.calls:
        for stream in call.inputs:
            found.append(
                Edge(
                    producer=stream.node, consumer=call.operator.name, lane=stream.lane, columns=stream.columns,
                    capacity_rows=_capacity(graph, call.operator, stream.lane),
                )
            )  # fmt: skip
    return found


def _capacity(graph: Graph, consumer: Operator, lane: str) -> int:
    """Rows under way on an edge.

    Prompts are few and cheap to hold back. A trainer acknowledges a group when its step is committed, so its edge
    must hold all that the staleness bound lets be in flight, and a step more: with less the run would deadlock.
    """
    if isinstance(consumer, Generate):
        return 128
    size = group_size(graph, lane) or 1
    if isinstance(consumer, Learn):
        ahead = max((f.max_staleness for f in graph.feedbacks if f.weights.trainer is consumer), default=1)
        return max(_CAPACITY_ROWS, (ahead + 2) * consumer.step_prompts * size)
    return max(_CAPACITY_ROWS, 2 * size)


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
    return {
        "node": node, "columns": columns, "origins": origins, "bounds": bounds,
        "on_demand": operator.name in plan.on_demand, "threads": plan.placements[node].threads,
        "replicas": plan.placements[node].replicas,
    }  # fmt: skip


def marks(graph: Graph, node: str, lane: str) -> str | None:
    """The ledger state that rows leaving `node` have reached; None where the next node will say so itself."""
    state = graph.operators[node].state
    readers = [edge.consumer for edge in edges(graph) if edge.producer == node and edge.lane == lane]
    if state == "issued" or any(graph.operators[reader].state == state for reader in readers):
        return None
    return state
