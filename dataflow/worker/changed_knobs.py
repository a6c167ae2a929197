"""A graph with the knobs that were changed while its run went on, and what each node has to know of
them.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataflow.folder.live_changes import MAX_STALENESS, KnobChange, Swap, of_operators
from dataflow.graph import Graph
from dataflow.planning.plan import Plan, bounds_of
from dataflow.planning.wiring import bounds_at
from dataflow.runtime import KnobsInForce


def changed(graph: Graph, changes: Iterable[KnobChange]) -> Graph:
    """The graph with the last value of each knob. Errors: GraphError."""
    wishes = {f"{change.node}.{change.knob}": change.value for change in changes}
    return graph.set_knobs(wishes) if wishes else graph


def roomiest(graph: Graph, changes: Iterable[KnobChange]) -> Graph:
    """The graph with the largest bound on staleness that each reader has had: edges hold all
    rollouts that it let start.
    """
    wishes: dict[str, int] = {}
    for feedback in graph.feedbacks:
        name = feedback.reader.name
        had = [
            change.value
            for change in changes
            if change.node == name and change.knob == MAX_STALENESS
        ]
        if had and max(had) > feedback.max_staleness:
            wishes[f"{name}.{MAX_STALENESS}"] = max(had)
    return graph.set_knobs(wishes) if wishes else graph


def counts_itself(change: KnobChange) -> bool:
    """Whether a trainer says from which of its steps on it holds: of its own knobs, and of the
    bound that it sweeps by.
    """
    return change.trainer == change.node or change.knob == MAX_STALENESS


@dataclass(frozen=True, kw_only=True)
class ChangedGraph:
    """A declared graph and the changes to its knobs, in order."""

    declared: Graph
    plan: Plan
    changes: Sequence[KnobChange] = ()
    swaps: Sequence[Swap] = ()
    """The swaps of `declared`'s operators, in order."""

    @property
    def in_place(self) -> tuple[KnobChange, ...]:
        """Changes of operators that this graph has."""
        return of_operators(self.changes, self.swaps)

    @property
    def last(self) -> int:
        """The number of the last change; 0: there was none."""
        return max((change.number for change in self.changes), default=0)

    def now(self) -> Graph:
        """The graph with the values in force."""
        return changed(self.declared, self.in_place)

    def knobs(self, now: Graph, node: str) -> KnobsInForce:
        """The knobs in force at a node. now: what `now` gave.

        A trainer gets its declaration as it was: of each change the ledger says from which step on
        it counts.
        """
        trains = self.declared.operators[node].trains
        graph = self.declared if trains else now
        bounds = {
            source: dataclasses.replace(bound, max_staleness=bounds.max_staleness)
            for source, bounds in bounds_of(graph).items()
            if (bound := self.plan.bounds.get(source)) is not None
        }
        plan = dataclasses.replace(self.plan, bounds=bounds)
        mine = [
            change
            for change in self.in_place
            if change.node == node or (trains and change.trainer == node and counts_itself(change))
        ]
        operator = graph.operators[node]
        return KnobsInForce(
            operator=operator, bounds=bounds_at(graph, plan, operator), changes=tuple(mine)
        )
