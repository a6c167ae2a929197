"""The graph a user declares: operators, streams between them, weights back to the readers."""

import difflib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx
import pyarrow as pa

from dataflow.errors import GraphError
from dataflow.node import Operator, Source
from dataflow.records import DROP_REASON, ERROR
from dataflow.stream import Join, Prompt, Rollout, Stream, Weights

if TYPE_CHECKING:
    from dataflow.planning.plan import Plan


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
    max_staleness: int
    """How many versions a trained rollout's oldest token may be behind; 0 is synchronous."""


class Graph:
    """Operators and the two kinds of edge between them; checked while it is built and as a whole by `check`.

    >>> from dataflow import Graph, Model
    >>> from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
    >>> g, model = Graph("tiny"), Model("policies/tiny")
    >>> generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model, prompts_per_step=2)
    >>> trainer(generator(g.source(FakePrompts())))
    >>> g.feedback(trainer.weights, generator, max_staleness=1)
    >>> g
    Graph('tiny': prompts, generator, trainer)
    >>> g.check()
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name or not name.replace("_", "").replace("-", "").isalnum():
            raise GraphError(
                f"a graph's name becomes a folder, but {name!r} cannot; "
                f"use letters, digits, '-' and '_', as in Graph(\"aipo\")"
            )
        self.name = name
        self.operators: dict[str, Operator] = {}
        self.calls: list[Call] = []
        self.feedbacks: list[Feedback] = []
        self._inputs: dict[tuple[str, str], tuple[Stream[Any], ...]] = {}

    def __repr__(self) -> str:
        return f"Graph('{self.name}': {', '.join(self.operators)})"

    def source(self, source: Source) -> Stream[Prompt]:
        """The stream of a source's prompts; its name becomes the lane of everything made from them."""
        if not isinstance(source, Source):
            raise GraphError(
                f"g.source takes a source, but got {_describe(source)}; give it Prompts(...) or another Source"
            )
        if source.name in self.operators:
            raise GraphError(
                f"two sources are called '{source.name}'; give one of them another name: "
                f'{type(source).__name__}(..., name="...")'
            )
        self._add(source)
        return self._record(source, (), Stream(self, source.name, source.name, source.provides({})))

    def apply(self, operator: Operator, stream: Stream[Any]) -> Stream[Rollout]:
        """What `operator(stream)` does; refuses columns that are missing or of the wrong type."""
        if not isinstance(stream, Stream):
            raise GraphError(
                f"'{operator.name}' is applied to {_describe(stream)}, which is no stream; "
                f"apply it to g.source(...) or to another operator's output"
            )
        if isinstance(operator, Source):
            raise GraphError(f"'{operator.name}' is a source and takes no stream; use g.source({operator.name})")
        self._add(operator)
        key = (operator.name, stream.lane)
        if key in self._inputs and self._inputs[key] != (stream,):
            if operator.name in self._upstream(stream):
                raise GraphError(
                    f"'{operator.name}' would read its own output, which came to it through '{stream.node}': a cycle "
                    f"of data; loops live inside an operator, and only g.feedback(...) goes back"
                )
            other = self._inputs[key][0]
            raise GraphError(
                f"'{operator.name}' is applied twice to rows of '{stream.lane}', "
                f"to the outputs of '{other.node}' and of '{stream.node}'; "
                f'give one of them another name, as in {operator.name}.renamed("{operator.name}_2")'
            )
        if key in self._inputs:
            return next(c.output for c in self.calls if (c.operator.name, c.output.lane) == key)
        self._check_columns(operator, stream)
        for column in operator.provides({}):
            if column in stream.columns and column not in (ERROR, DROP_REASON):
                raise GraphError(
                    f"'{operator.name}' writes column '{column}', but the rows of '{stream.node}' have it already; "
                    f"rename the operator, or drop the column from the source"
                )
        columns = operator.provides(stream.columns)
        return self._record(operator, (stream,), Stream(self, operator.name, stream.lane, columns))

    def merge(self, streams: tuple[Stream[Any], ...]) -> Stream[Rollout]:
        """What `join(a, b, ...)` does."""
        columns: dict[str, pa.DataType] = {}
        for stream in streams:
            for name, kind in stream.columns.items():
                if columns.setdefault(name, kind) != kind:
                    raise GraphError(
                        f"join gets column '{name}' as {columns[name]} and, from '{stream.node}', as {kind}; "
                        f"rename one of the two"
                    )
        names = (f"join{'' if n == 1 else n}" for n in itertools.count(1))
        operator = Join(name=next(name for name in names if name not in self.operators))
        self._add(operator)
        return self._record(operator, streams, Stream(self, operator.name, streams[0].lane, columns))

    def feedback(self, weights: Weights, reader: Operator, *, max_staleness: int) -> None:
        """Carry what a trainer learns back to `reader`: the graph's only cycle.

        max_staleness: versions that a rollout's oldest token may be behind the trainer when it is trained.
        """
        if not isinstance(weights, Weights):
            raise GraphError(
                f"g.feedback carries weights, but got {_describe(weights)}; give it trainer.weights as the first"
            )
        if not isinstance(reader, Operator):
            raise GraphError(f"g.feedback needs an operator that reads weights, but got {_describe(reader)}; "
                             f"give it the generator")  # fmt: skip
        trainer = weights.trainer
        if isinstance(max_staleness, bool) or not isinstance(max_staleness, int) or max_staleness < 0:
            raise GraphError(
                f"max_staleness counts versions and cannot be {max_staleness!r}; "
                f"use 0 for synchronous training, 1 or more for asynchronous"
            )
        if trainer.uses is None or reader.uses is None:
            lacks = reader.name if reader.uses is None else trainer.name
            raise GraphError(f"'{lacks}' has no model, so no weights can flow to it; name an operator with a model")
        if reader.uses.is_frozen:
            raise GraphError(
                f"'{reader.name}' reads frozen '{reader.uses.name}', which never changes; "
                f"drop the feedback, or give it the model without frozen()"
            )
        if reader.uses != trainer.uses:
            raise GraphError(
                f"'{trainer.name}' trains '{trainer.uses.name}' but '{reader.name}' reads "
                f"'{reader.uses.name}'{_difference(trainer.uses, reader.uses)}; give both the same Model"
            )
        if any(f.reader is reader and f.weights == weights for f in self.feedbacks):
            raise GraphError(f"'{reader.name}' already has a feedback from '{trainer.name}'; drop one of the two lines")
        self.feedbacks.append(Feedback(weights, reader, max_staleness))

    def swap(self, name: str, operator: Operator) -> "Graph":
        """A new graph with the operator called `name` replaced by another, checked anew; this one stays as it is."""
        if name not in self.operators:
            raise GraphError(
                f"there is no operator '{name}' to swap; the graph has {list(self.operators)}"
                f"{nearest(name, self.operators)}"
            )
        old, new = self.operators[name], operator.renamed(name)
        if old.kind != new.kind:
            raise GraphError(f"'{name}' is a {old.kind} and {_describe(operator)} is a {new.kind}; swap like for like")
        graph = Graph(self.name)
        made: dict[tuple[str, str], Stream[Any]] = {}
        for call in self.calls:
            current = new if call.operator.name == name else call.operator
            inputs = tuple(made[s.node, s.lane] for s in call.inputs)
            if isinstance(current, Source):
                output: Stream[Any] = graph.source(current)
            elif isinstance(current, Join):
                output = graph.merge(inputs)
            else:
                output = graph.apply(current, inputs[0])
            made[call.output.node, call.output.lane] = output
        for feedback in self.feedbacks:
            trainer: Any = new if feedback.weights.trainer is old else feedback.weights.trainer
            reader = new if feedback.reader is old else feedback.reader
            graph.feedback(Weights(trainer), reader, max_staleness=feedback.max_staleness)
        graph.check()
        return graph

    def check(self) -> None:
        """Refuse the graph (GraphError) for the first thing that could not work; see dataflow.check."""
        from dataflow.check import check

        check(self)

    def is_light(self, nodes: Iterable[str]) -> bool:
        """Whether a worker of these nodes needs no torch."""
        return all(self.operators[node].light for node in nodes)

    @property
    def nx(self) -> "nx.MultiDiGraph[str]":
        """The graph for NetworkX: `operator` on nodes; on edges `plane`, and `columns` or `max_staleness`."""
        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=self.name)
        for name, operator in self.operators.items():
            graph.add_node(name, operator=operator)
        for call in self.calls:
            for stream in call.inputs:
                graph.add_edge(
                    stream.node, call.operator.name, key=stream.lane, plane="data", lane=stream.lane,
                    columns=stream.columns, added=self._added(stream),
                )  # fmt: skip
        for feedback in self.feedbacks:
            graph.add_edge(
                feedback.weights.trainer.name, feedback.reader.name, key="weights", plane="weights",
                model=feedback.reader.uses, max_staleness=feedback.max_staleness,
            )  # fmt: skip
        return graph

    def draw(self, path: str | Path, plan: "Plan | None" = None) -> Path:
        """Draw it as .svg, .dot, .mmd or .html; a plan adds device groups, as frames, and how weights travel."""
        from dataflow.draw import draw

        graph = self.nx
        for (trainer, reader), executor in (plan.executors() if plan else {}).items():
            graph.edges[trainer, reader, "weights"]["executor"] = executor
        return draw(graph, Path(path), frames=plan.frames() if plan else None, title=self.name)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from dataflow.draw import mimebundle

        return mimebundle(self.nx, title=self.name)

    def _upstream(self, stream: Stream[Any]) -> set[str]:
        seen: set[str] = set()
        todo = [stream]
        while todo:
            current = todo.pop()
            if current.node not in seen:
                seen.add(current.node)
                todo += self._inputs.get((current.node, current.lane), ())
        return seen

    def _added(self, stream: Stream[Any]) -> tuple[str, ...]:
        before: set[str] = set()
        for source in self._inputs.get((stream.node, stream.lane), ()):
            before |= set(source.columns)
        return tuple(name for name in stream.columns if name not in before)

    def _add(self, operator: Operator) -> None:
        if not isinstance(operator, Operator):
            raise GraphError(f"an operator is wanted, but got {_describe(operator)}; see CONTRIBUTING.md")
        known = self.operators.get(operator.name)
        if known is not None and known.identity() != operator.identity():
            raise GraphError(
                f"two operators are called '{operator.name}', {_describe(known)} and {_describe(operator)}; "
                f'give one of them another name, as in name="{operator.name}_2"'
            )
        if known is None:
            if not operator.name.replace("-", "_").isidentifier():
                raise GraphError(
                    f"an operator's name becomes a column and a file, but {operator.name!r} cannot; "
                    f"use letters, digits, '-' and '_'"
                )
            for fault in operator.faults():
                raise GraphError(fault)
            self.operators[operator.name] = operator

    def _record(self, operator: Operator, inputs: tuple[Stream[Any], ...], output: Stream[Any]) -> Stream[Any]:
        self.calls.append(Call(operator, inputs, output))
        self._inputs[operator.name, output.lane] = inputs
        return output

    def _check_columns(self, operator: Operator, stream: Stream[Any]) -> None:
        from dataflow.check import missing_column, wrong_type
        from dataflow.records import fits

        for column, annotation in operator.reads().items():
            if column not in stream.columns:
                raise GraphError(missing_column(self, operator, column, stream))
            if not fits(stream.columns[column], annotation):
                raise GraphError(wrong_type(operator, column, stream, annotation))


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' where something known is spelled much like `name`, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _describe(value: Any) -> str:
    if isinstance(value, Operator):
        return f"{type(value).__name__}(name='{value.name}')"
    if isinstance(value, Stream | Weights):
        return f"a {type(value).__name__}"
    return f"{type(value).__name__} {value!r:.60}"


def _difference(first: Any, second: Any) -> str:
    differs = [n for n in first.__dataclass_fields__ if getattr(first, n) != getattr(second, n)]
    return f" (they differ in {', '.join(differs)})" if differs else ""
