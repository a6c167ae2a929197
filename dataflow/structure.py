"""The pure structure of a graph: which operator is applied to which stream, whose weights go back
to whom.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dataflow.node import Generate, Learn, Operator, Sink, Source, Stream, Weights
from dataflow.weight_ends import Refresh

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True)
class Call:
    """One application of an operator: the streams that went in and the one that came out."""

    operator: Operator
    inputs: tuple[Stream[Any], ...]
    output: Stream[Any]


@dataclass(frozen=True)
class Feedback:
    """Weights that flow from a trainer back to a reader."""

    weights: Weights
    reader: Operator
    max_staleness: int = 0
    """How many versions a trained rollout's oldest token may be behind; 0 is synchronous."""
    refresh: Refresh | None = None
    """For a reader that gets every n-th version; None: it gets the newest."""


class Structure:
    """Operators and the two kinds of edge between them; `Graph` builds it, and whatever looks at a
    graph reads it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.operators: dict[str, Operator] = {}
        self.calls: list[Call] = []
        self.feedbacks: list[Feedback] = []
        self._inputs: dict[tuple[str, str], tuple[Stream[Any], ...]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}('{self.name}': {', '.join(self.operators)})"

    def is_light(self, nodes: Iterable[str]) -> bool:
        """Whether a worker of these nodes needs no torch."""
        return all(self.operators[node].light for node in nodes)

    @property
    def nx(self) -> "networkx.MultiDiGraph[str]":
        """The graph for NetworkX: nodes have `operator`; edges `plane` (data, turns or weights),
        and `columns`, `max_staleness` or `refresh`. An edge of turns leads from an episode to the
        generator that it asks.
        """
        import networkx

        graph: networkx.MultiDiGraph[str] = networkx.MultiDiGraph(name=self.name)
        for name, operator in self.operators.items():
            graph.add_node(name, operator=operator)
        for call in self.calls:
            for stream in call.inputs:
                graph.add_edge(
                    stream.node,
                    call.operator.name,
                    key=stream.source,
                    plane="data",
                    source=stream.source,
                    columns=stream.columns,
                    added=self._added(stream),
                )
        for episode in episodes_of(self):
            assert episode.asks is not None, "that is what makes it one"
            graph.add_edge(episode.name, episode.asks.name, key="turns", plane="turns")
        for feedback in self.feedbacks:
            graph.add_edge(
                feedback.weights.trainer.name,
                feedback.reader.name,
                key="weights",
                plane="weights",
                model=feedback.reader.uses,
                refresh=feedback.refresh,
                max_staleness=None if feedback.refresh else feedback.max_staleness,
            )
        return graph

    def _added(self, stream: Stream[Any]) -> tuple[str, ...]:
        before: set[str] = set()
        for call in self._inputs.get((stream.node, stream.source), ()):
            before |= set(call.columns)
        return tuple(name for name in stream.columns if name not in before)


def sources_of(graph: Structure, node: str) -> list[str]:
    """The sources whose rows reach a node."""
    return [call.output.source for call in graph.calls if call.operator.name == node]


def episodes_of(graph: Structure, generator: str | None = None) -> list[Generate]:
    """The episodes of a graph, or those of them that ask one generator for their turns."""
    episodes = [
        op for op in graph.operators.values() if isinstance(op, Generate) and op.asks is not None
    ]
    return [op for op in episodes if generator in (None, op.asks and op.asks.name)]


def drawn_by(graph: Structure, generator: str) -> list[str]:
    """The sources whose rollouts a generator draws, whole or turn by turn."""
    nodes = [generator, *(episode.name for episode in episodes_of(graph, generator))]
    return [source for node in nodes for source in sources_of(graph, node)]


def prompts_of(graph: Structure, source: str) -> int | None:
    """Prompts that a source issues before it ends, where that can be told."""
    operator = graph.operators[source]
    rows, epochs = (
        (operator.count() if isinstance(operator, Source) else None),
        operator.traits.source.epochs,
    )
    return None if rows is None or epochs is None else rows * epochs


def sinks_of(graph: Structure, source: str) -> list[Operator]:
    """The sinks in which rows of a source end."""
    return [
        c.operator for c in graph.calls if c.output.source == source and c.operator.kind == "sink"
    ]


def readers_of(graph: Structure, trainer: str, refresh: Refresh | None = None) -> list[Operator]:
    """The operators that take a trainer's newest weights, or those that are refreshed so."""
    return [
        feedback.reader
        for feedback in graph.feedbacks
        if feedback.weights.trainer.name == trainer and feedback.refresh == refresh
    ]


def refreshes_of(graph: Structure, trainer: str) -> list[Refresh]:
    """In what ways readers of a trainer's weights are refreshed, each once."""
    refreshes = [
        feedback.refresh for feedback in graph.feedbacks if feedback.weights.trainer.name == trainer
    ]
    return list(dict.fromkeys(refresh for refresh in refreshes if refresh is not None))


def refresh_of(graph: Structure, reader: str) -> Refresh | None:
    """How a reader of weights is refreshed; None: it is not."""
    return next(
        (feedback.refresh for feedback in graph.feedbacks if feedback.reader.name == reader), None
    )


def line_of(graph: Structure, trainer: str, refresh: Refresh | None) -> str:
    """What a trainer's weight plane is called where its ends meet: readers that are refreshed have
    one of their own.
    """
    return (
        trainer if refresh is None else f"{trainer}.{refreshes_of(graph, trainer).index(refresh)}"
    )


def generators_of(graph: Structure, node: str) -> list[Generate]:
    """The generators upstream of a node."""
    import networkx

    sources = set(sources_of(graph, node))
    generators = {
        c.operator.name: c.operator
        for c in graph.calls
        if c.output.source in sources and isinstance(c.operator, Generate)
    }
    reach = (
        networkx.ancestors(
            networkx.DiGraph(
                (u, v) for u, v, d in graph.nx.edges(data=True) if d["plane"] == "data"
            ),
            node,
        )
        if generators
        else set()
    )
    return [operator for name, operator in generators.items() if name in reach]


def group_size(graph: Structure, source: str) -> int | None:
    """Rollouts in a group of a source: its own wish, else its generator's; None without a
    generator.
    """
    size = graph.operators[source].traits.source.group_size
    for call in graph.calls:
        if call.output.source == source and isinstance(call.operator, Generate):
            return int(size or call.operator.rollouts_per_prompt)
    return None


def trainers(graph: Structure) -> list[str]:
    """All of them, in the graph's order."""
    return [name for name, operator in graph.operators.items() if operator.trains]


def evaluations(graph: Structure) -> list[str]:
    """The sinks that do not train, in the graph's order."""
    return [
        name
        for name, operator in graph.operators.items()
        if isinstance(operator, Sink) and not operator.trains
    ]


def feeding(graph: Structure) -> dict[str, Feedback]:
    """By source, the feedback from a trainer of its rows to the generator of its rows.

    There is one at most, as a model has one trainer. A critic, whose weights go to another
    operator, feeds none.
    """
    feedbacks: dict[str, Feedback] = {}
    for feedback in graph.feedbacks:
        if isinstance(feedback.weights.trainer, Learn) and isinstance(feedback.reader, Generate):
            generated = set(drawn_by(graph, feedback.reader.name))
            feedbacks |= {
                source: feedback
                for source in sources_of(graph, feedback.weights.trainer.name)
                if source in generated
            }
    return feedbacks


def leading(graph: Structure) -> list[str]:
    """The trainers whose steps are the run's: those that feed a generator; all of them where none
    does.
    """
    feeders = {feedback.weights.trainer.name for feedback in feeding(graph).values()}
    return [name for name in trainers(graph) if name in feeders or not feeders]


def own_folder(graph: Structure, node: str) -> str | None:
    """Where in rollouts/ and checkpoints/ a trainer, and in rollouts/ an evaluation, keeps its own;
    None for the only one of a graph.
    """
    alike = trainers(graph) if graph.operators[node].trains else evaluations(graph)
    return node if len(alike) > 1 and node in alike else None


def kept_by(graph: Structure) -> list[str]:
    """Folders in checkpoints/ of all trainers; empty for the only one."""
    return [own_folder(graph, node) or "" for node in trainers(graph)]


def lines_of(lines: Iterable[Mapping[str, Any]], trainer: str | None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the steps of other trainers than this one; all of them for
    None.
    """
    return [
        dict(line)
        for line in lines
        if trainer is None or "eval_accuracy" in line or line.get("node", trainer) == trainer
    ]


def edge_name(producer: str, consumer: str, source: str) -> str:
    """That of an edge with these ends, for rows of this source.

    >>> edge_name("generator", "reward", "prompts")
    'generator>reward:prompts'
    """
    return f"{producer}>{consumer}:{source}"
