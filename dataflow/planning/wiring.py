"""The data edges of a planned graph as values: who sends which rows to whom, how much may be under
way.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dataflow.node import Generate, Learn, Operator, Stream
from dataflow.planning.plan import Plan, bounds_of
from dataflow.records import TURN_ANSWER, TURN_REQUEST, Columns, version_column
from dataflow.runtime import GraphFacts
from dataflow.scorer import Scorer
from dataflow.staleness import Bound, capacity
from dataflow.structure import (
    Structure,
    edge_name,
    episodes_of,
    feeding,
    group_size,
    own_folder,
    prompts_of,
    readers_of,
    sinks_of,
    sources_of,
)

_CAPACITY_ROWS = 4096
_PROMPTS = 512
_MOST_PROMPTS = 1 << 16
_TOGETHER = 16
"""The most groups that travel, and are acknowledged, together."""
_PARTS = 8
"""A step's prompts travel in at least so many parts, so that so many replicas share them."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One edge of one source: rows of a stream, or the turns of an episode, whose name is their
    source.
    """

    producer: str
    consumer: str
    source: str
    columns: Columns
    capacity_rows: int
    """Rows that may be sent and not yet acknowledged, for each receiver."""
    batch_rows: int = 1024
    """Most rows that travel together, where a single group has no more."""
    plane: Literal["data", "turns"] = "data"
    """What travels here: rows that go on, or requests for turns and their answers, which end where
    they arrive."""
    most_rows: int | None = None
    """Rows that one sender may have under way with all receivers together; None: as many as these
    give it credit."""
    slack_rows: int = 0
    """Credits of receivers may differ by so many rows, and batches still go to them in turn."""

    @property
    def name(self) -> str:
        """The name in errors and headers."""
        return edge_name(self.producer, self.consumer, self.source)


def edges(graph: Structure) -> list[Edge]:
    """All edges but those of weights: of data, in the order in which they were declared, then of
    turns.
    """
    bounds = bounds_of(graph)
    data = [
        _prompts(graph, stream, call.operator, bounds.get(stream.source))
        if isinstance(call.operator, Generate)
        else _rows(graph, stream, call.operator, bounds.get(stream.source))
        for call in graph.calls
        for stream in call.inputs
    ]
    return [
        *data,
        *(edge for episode in episodes_of(graph) for edge in _turns(graph, episode, data)),
    ]


def _turns(graph: Structure, episode: Generate, data: list[Edge]) -> list[Edge]:
    """Requests to the generator and its answers. A turn is acknowledged when its answer has
    arrived, and a rollout asks for one at a time: of all rollouts that may be without an outcome
    each finds room, so that none that the trainer waits for stands behind those that may not start
    yet.
    """
    assert episode.asks is not None, "an episode asks a generator"
    arriving = [edge for edge in data if edge.consumer == episode.name]
    rows = sum(edge.capacity_rows * (group_size(graph, edge.source) or 1) for edge in arriving)

    def edge(producer: str, consumer: str, columns: Columns) -> Edge:
        return Edge(
            producer=producer,
            consumer=consumer,
            source=episode.name,
            columns=columns,
            plane="turns",
            capacity_rows=max(_CAPACITY_ROWS, 2 * rows),
        )

    return [
        edge(episode.name, episode.asks.name, TURN_REQUEST),
        edge(episode.asks.name, episode.name, TURN_ANSWER),
    ]


def _prompts(
    graph: Structure, stream: Stream[Any], generator: Operator, bound: Bound | None
) -> Edge:
    """Prompts are few and cheap to hold back.

    A prompt is acknowledged when its rollouts have an outcome. No more of them are under way than
    may be without one, however many replicas there are: the first groups of one that leaves or dies
    then find room with any other, which cannot finish the later ones that it has before those.
    Where nobody is trained all have an outcome soon. A few neighbours travel together; of those
    that have an outcome the source hears at once, but they keep their credit until all do, so a
    replica has credit for as many times more. Replicas take turns, whichever of them has just given
    back credit, so that all work on a step.
    """
    trained = _longest_step(graph, stream.source)
    step = bound.prompts_per_step if bound is not None else trained or _PROMPTS
    together = max(1, min(_TOGETHER, step // _PARTS))
    most = _without_outcome(graph, stream.source, bound) + together * bool(trained)
    return Edge(
        producer=stream.node,
        consumer=generator.name,
        source=stream.source,
        columns=stream.columns,
        capacity_rows=together * most if trained else most,
        batch_rows=together,
        most_rows=most if trained else None,
        slack_rows=step // 2,
    )


def _rows(graph: Structure, stream: Stream[Any], consumer: Operator, bound: Bound | None) -> Edge:
    """A group is acknowledged when it has an outcome, and an operator that waits for a critic's
    weights holds groups until they come: an edge must hold all that may be without one, and a step
    more. Of groups that travel together each may keep the credit of all. With less the run would
    deadlock.
    """
    size = group_size(graph, stream.source) or 1
    most = _without_outcome(graph, stream.source, bound) + _longest_step(graph, stream.source)
    return Edge(
        producer=stream.node,
        consumer=consumer.name,
        source=stream.source,
        columns=stream.columns,
        capacity_rows=_TOGETHER * max(_CAPACITY_ROWS, most * size),
        batch_rows=_TOGETHER * size,
    )


def _without_outcome(graph: Structure, source: str, bound: Bound | None) -> int:
    """Groups of a source that may be without an outcome: all that may be in flight, and a step's
    worth to go on with; but never less than the trainer with the longest step needs to make one,
    with as many dropped and not recorded yet.
    """
    ahead = _PROMPTS
    if bound is not None:
        ahead = capacity(bound.prompts_per_step, bound.max_staleness) + bound.prompts_per_step
    return max(min(ahead, _MOST_PROMPTS), 2 * _longest_step(graph, source))


def _longest_step(graph: Structure, source: str) -> int:
    """Prompts in the longest step that any trainer makes of a source; 0: none does."""
    return max(
        (sink.step_prompts for sink in sinks_of(graph, source) if isinstance(sink, Learn)),
        default=0,
    )


def graph_around(graph: Structure, plan: Plan, node: str) -> GraphFacts:
    """What a node knows of the graph around it."""
    operator = graph.operators[node]
    columns: dict[str, Columns] = {}
    origins: dict[str, tuple[str, ...]] = {}
    for edge in edges(graph):
        if edge.consumer == node and edge.plane == "data":
            columns.setdefault(edge.source, edge.columns)
            origins[edge.source] = (*origins.get(edge.source, ()), edge.producer)
    trainers = [
        feedback.weights.trainer.name
        for feedback in graph.feedbacks
        if feedback.reader.name == node and feedback.refresh is None
    ]
    return GraphFacts(
        columns=columns,
        origins=origins,
        scores=_scores(graph, columns),
        forwards=_forwards(graph, columns),
        bounds=bounds_at(graph, plan, operator),
        feedback=_feedback(graph, node),
        episodes=tuple(episode.name for episode in episodes_of(graph, node)),
        takers=tuple(
            call.operator
            for call in graph.calls
            if call.output.source == node
            and isinstance(call.operator, Generate)
            and call.operator.asks is None
        ),
        own_folder=own_folder(graph, node),
        prompt_steps=_prompt_steps(graph, operator),
        on_demand=operator.name in plan.on_demand,
        quantized=quantized_format(graph, trainers[0]) if trainers else None,
    )


def _scores(graph: Structure, columns: Mapping[str, Columns]) -> dict[str, str]:
    """The scorers of single rollouts whose columns arrive, and where each is defined."""
    arriving = {name for of_source in columns.values() for name in of_source}
    rows = [op for op in graph.operators.values() if isinstance(op, Scorer) and op.per != "group"]
    return {op.name: op.where for op in rows if op.name in arriving}


def _forwards(graph: Structure, columns: Mapping[str, Columns]) -> tuple[str, ...]:
    """The columns that arrive beside the version which made them."""
    arriving = dict.fromkeys(name for of_source in columns.values() for name in of_source)
    reading = {name for name, operator in graph.operators.items() if operator.uses is not None}
    return tuple(name for name in arriving if name in reading and version_column(name) in arriving)


def _prompt_steps(graph: Structure, operator: Operator) -> int | None:
    """Steps that a trainer's prompts are enough for."""
    if not isinstance(operator, Learn):
        return None
    counts = [prompts_of(graph, source) for source in sources_of(graph, operator.name)]
    counts_known = [count for count in counts if count is not None]
    return min(counts_known) // operator.step_prompts if counts_known else None


def bounds_at(graph: Structure, plan: Plan, operator: Operator) -> dict[str, Bound]:
    """The bounds that hold at an operator, by source.

    A trainer sweeps only where the tokens are of its own versions: a critic has no bound. Where a
    source has several trainers, its source issues enough for the one that takes most, and the
    generator starts whatever was issued.
    """
    if isinstance(operator, Learn):
        fed = {
            source
            for source, feedback in feeding(graph).items()
            if feedback.weights.trainer is operator
        }
        return {source: bound for source, bound in plan.bounds.items() if source in fed}
    bounds = dict(plan.bounds)
    takes = [
        sink.step_prompts for sink in sinks_of(graph, operator.name) if isinstance(sink, Learn)
    ]
    # nobody waits for weights: only the source has to know when to stop
    if takes and operator.name not in bounds:
        bounds[operator.name] = Bound(max_staleness=0, prompts_per_step=max(takes))
    for source, bound in plan.bounds.items():
        takes = [sink.step_prompts for sink in sinks_of(graph, source) if isinstance(sink, Learn)]
        if len(takes) > 1 and operator.name == source:
            bounds[source] = dataclasses.replace(bound, prompts_per_step=max(takes))
        elif len(takes) > 1:
            bounds[source] = dataclasses.replace(bound, steps=None)
    return bounds


def _feedback(graph: Structure, node: str) -> Bound | None:
    """Of the edge that brings a reader its weights."""
    for feedback in graph.feedbacks:
        if feedback.reader.name == node:
            prompts = feedback.weights.trainer.step_prompts
            every = feedback.refresh.every if feedback.refresh else None
            return Bound(
                max_staleness=feedback.max_staleness, prompts_per_step=prompts, every=every
            )
    return None


def quantized_format(graph: Structure, trainer: str) -> str | None:
    """The quantized format that all readers of a trainer want; None, full tensors, where one wants
    another or none.
    """
    formats = {reader.quantized for reader in readers_of(graph, trainer)}
    return formats.pop() if len(formats) == 1 else None


def marks(graph: Structure, node: str, source: str) -> str | None:
    """The ledger state that rows leaving `node` have reached; None where the next node will say so
    itself.
    """
    state = graph.operators[node].state
    readers = [
        edge.consumer for edge in edges(graph) if edge.producer == node and edge.source == source
    ]
    if state == "issued" or any(graph.operators[reader].state == state for reader in readers):
        return None
    return state
