"""The graph a user declares: operators, streams between them, weights back to the readers."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dataflow.annotations import fits
from dataflow.check import check, missing_column, newest_fault, refresh_fault, wrong_type
from dataflow.errors import GraphError, checked, nearest
from dataflow.node import Generate, Operator, Prompt, Rollout, Source, Stream, Weights
from dataflow.records import DROP_REASON, ERROR, ROLLOUT_ID
from dataflow.scoring.joining import Join
from dataflow.structure import Call, Feedback, Structure
from dataflow.weight_ends import Refresh

if TYPE_CHECKING:
    from dataflow.planning.plan import Plan


class Graph(Structure):
    """A structure that a user builds: checked call by call, and as a whole by `check`; it can draw
    itself.

    >>> from dataflow import Graph, Model
    >>> from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
    >>> g, model = Graph("tiny"), Model("policies/tiny")
    >>> generator = FakeGenerator(model=model)
    >>> trainer = FakeTrainer(model=model, prompts_per_step=2)
    >>> trainer(generator(g.source(FakePrompts())))
    >>> g.feedback(trainer.weights, generator, max_staleness=1)
    >>> g
    Graph('tiny': prompts, generator, trainer)
    >>> g.check()
    """

    def __init__(self, name: str) -> None:
        if (
            not isinstance(name, str)
            or not name
            or not name.replace("_", "").replace("-", "").isalnum()
        ):
            raise GraphError(
                f"a graph's name becomes a folder, but {name!r} cannot; "
                "use letters, digits, '-' and '_', as in Graph(\"aipo\")"
            )
        super().__init__(name)

    def source(self, source: Source) -> Stream[Prompt]:
        """The stream of a source's prompts; everything made from them carries its name."""
        if not isinstance(source, Source):
            raise GraphError(
                f"g.source takes a source, but got {_describe(source)}; give it Prompts(...) or"
                " another Source"
            )
        if source.name in self.operators:
            raise GraphError(
                f"two sources are called '{source.name}'; give one of them another name: "
                f'{type(source).__name__}(..., name="...")'
            )
        self._add(source)
        return self._record(source, (), Stream(self, source.name, source.name, source.provides({})))

    def apply(self, operator: Operator, stream: Stream[Any]) -> Stream[Rollout]:
        """The stream of `operator(stream)`; refuses columns that are missing or of the wrong
        type.
        """
        if not isinstance(stream, Stream):
            raise GraphError(
                f"'{operator.name}' is applied to {_describe(stream)}, which is no stream; "
                "apply it to g.source(...) or to another operator's output"
            )
        if isinstance(operator, Source):
            raise GraphError(
                f"'{operator.name}' is a source and takes no stream; use g.source({operator.name})"
            )
        self._add(operator)
        key = (operator.name, stream.source)
        if key in self._inputs and self._inputs[key] != (stream,):
            if operator.name in self._upstream(stream):
                raise GraphError(
                    f"'{operator.name}' would read its own output, which came to it through"
                    f" '{stream.node}': a cycle of data; loops live inside an operator, and only"
                    " g.feedback(...) goes back"
                )
            consumer = self._inputs[key][0]
            raise GraphError(
                f"'{operator.name}' is applied twice to rows of '{stream.source}', "
                f"to the outputs of '{consumer.node}' and of '{stream.node}'; "
                f'give one of them another name, as in {operator.name}.renamed("{operator.name}_2")'
            )
        if key in self._inputs:
            return next(c.output for c in self.calls if (c.operator.name, c.output.source) == key)
        self._check_columns(operator, stream)
        for column in operator.provides({}):
            if column in stream.columns and column not in (ERROR, DROP_REASON):
                raise GraphError(
                    f"'{operator.name}' writes column '{column}', but the rows of '{stream.node}'"
                    " have it already; rename the operator, or drop the column from the source"
                )
        columns = operator.provides(stream.columns)
        return self._record(
            operator, (stream,), Stream(self, operator.name, stream.source, columns)
        )

    def merge(self, streams: tuple[Stream[Any], ...]) -> Stream[Rollout]:
        """The stream of `join(a, b, ...)`."""
        columns: dict[str, pa.DataType] = {}
        for stream in streams:
            for name, kind in stream.columns.items():
                if columns.setdefault(name, kind) != kind:
                    raise GraphError(
                        f"join gets column '{name}' as {columns[name]} and, from '{stream.node}',"
                        f" as {kind}; rename one of the two"
                    )
        names = (f"join{'' if n == 1 else n}" for n in itertools.count(1))
        operator = Join(name=next(name for name in names if name not in self.operators))
        self._add(operator)
        return self._record(
            operator, streams, Stream(self, operator.name, streams[0].source, columns)
        )

    @checked
    def feedback(
        self,
        weights: Weights,
        reader: Operator,
        *,
        max_staleness: int | None = None,
        every: int | None = None,
    ) -> None:
        """Carry what a trainer learns back to `reader`: the graph's only cycle. One of the two
        numbers is given.

        max_staleness: versions that a rollout's oldest token may be behind the trainer when it is
        trained. every: for a reference or a teacher, which begins with its own model: steps between
        two versions that it is refreshed with.
        """
        if not isinstance(weights, Weights):
            raise GraphError(
                f"g.feedback carries weights, but got {_describe(weights)}; give it trainer.weights"
                " as the first"
            )
        if not isinstance(reader, Operator):
            raise GraphError(
                f"g.feedback needs an operator that reads weights, but got {_describe(reader)}; "
                "give it the generator"
            )
        if (max_staleness is None) == (every is None):
            given_bounds = (
                "neither"
                if every is None
                else f"max_staleness={max_staleness!r} and every={every!r}"
            )
            raise GraphError(
                f"g.feedback to '{reader.name}' is told how new its weights are by one number, but"
                f" got {given_bounds}; give max_staleness=... to a reader of the newest weights,"
                " every=..."
                " to a reference that is refreshed"
            )
        if max_staleness is not None and (
            isinstance(max_staleness, bool)
            or not isinstance(max_staleness, int)
            or max_staleness < 0
        ):
            raise GraphError(
                f"max_staleness counts versions and cannot be {max_staleness!r}; "
                "use 0 for synchronous training, 1 or more for asynchronous"
            )
        if weights.trainer.uses is None or reader.uses is None:
            lacks = reader.name if reader.uses is None else weights.trainer.name
            raise GraphError(
                f"'{lacks}' has no model, so no weights can flow to it; name an operator with a"
                " model"
            )
        fault = (
            newest_fault(weights, reader)
            if every is None
            else refresh_fault(weights, reader, every)
        )
        if fault is not None:
            raise GraphError(fault)
        if existing := next((f for f in self.feedbacks if f.reader is reader), None):
            raise GraphError(
                f"'{reader.name}' already has a feedback from '{existing.weights.trainer.name}';"
                " drop"
                " one of the two lines"
            )
        refresh = None if every is None else Refresh(every=every, decay=weights.decay)
        self.feedbacks.append(Feedback(weights, reader, max_staleness or 0, refresh))

    def swap(self, name: str, operator: Operator) -> "Graph":
        """A new graph with the operator called `name` replaced by another, checked anew; this one
        stays as it is.
        """
        return self.swap_all({name: operator})

    def swap_all(self, operators: Mapping[str, Operator]) -> "Graph":
        """As `swap`, of several at once: those that share a model change it together."""
        instead = {}
        for name, operator in operators.items():
            old, new = self._known(name, "swap"), operator.renamed(name)
            if old.kind != new.kind:
                raise GraphError(
                    f"'{name}' is a {old.kind} and {_describe(operator)} is a {new.kind}; swap like"
                    " for like"
                )
            instead[name] = new
        return self._anew(instead=instead)

    def set_knobs(self, wishes: Mapping[str, Any]) -> "Graph":
        """A new graph with other values of knobs, by NODE.KNOB, checked anew; this one stays as it
        is.

        Those that `Operator.settable` names, and `max_staleness`, which is that of the feedback
        edge to a node. Whatever computes log-probabilities of its rollouts goes along with a
        generator's temperature.

        >>> from dataflow import Graph, Model
        >>> from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
        >>> g, model = Graph("tiny"), Model("policies/tiny")
        >>> generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model)
        >>> trainer(generator(g.source(FakePrompts())))
        >>> g.feedback(trainer.weights, generator, max_staleness=1)
        >>> values = {"generator.max_staleness": 2, "generator.temperature": 0.5, "trainer.lr": 0.1}
        >>> changed = g.set_knobs(values)
        >>> changed.operators["trainer"].knobs()["temperature"]
        0.5
        """
        from dataflow.planning.set_values import with_values

        instead, bounds = with_values(self, wishes)
        return self._anew(instead=instead, bounds=bounds)

    def insert(self, operator: Operator, *, after: str, source: str | None = None) -> "Graph":
        """A new graph with an operator on the stream behind the one called `after`, checked anew;
        this one stays.

        All that read that stream read the operator's output. source: on the rows of this source
        alone; None: of all that pass there.

        >>> from dataflow import Graph, scorer
        >>> from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
        >>> @scorer
        ... def short(completion: str) -> float:
        ...     return -float(len(completion))
        >>> g = Graph("tiny")
        >>> FakeTrainer()(FakeGenerator()(g.source(FakePrompts())))
        >>> scored = g.insert(short, after="generator")
        >>> scored
        Graph('tiny': prompts, generator, short, trainer)
        >>> scored.remove("short")
        Graph('tiny': prompts, generator, trainer)
        """
        if (
            not isinstance(operator, Operator)
            or operator.kind != "operator"
            or isinstance(operator, Join)
        ):
            kind = f", a {operator.kind}" if isinstance(operator, Operator) else ""
            raise GraphError(
                f"g.insert puts an operator between others, but got {_describe(operator)}{kind};"
                " give it one that takes rows and passes them on, such as a @scorer or a @keep"
                " filter"
            )
        before = self._known(after, "insert behind")
        if before.kind == "sink":
            read = [
                stream.node
                for call in self.calls
                if call.operator is before
                for stream in call.inputs
            ]
            raise GraphError(
                f"'{after}' is a sink, and no rows leave it for '{operator.name}'; insert it behind"
                f" what '{after}' reads: {read}"
            )
        if operator.name in self.operators:
            raise GraphError(
                f"'{operator.name}' is in the graph already; give the one that you insert another"
                " name: "
                f'{operator.name}.renamed("{operator.name}_2")'
            )
        passing = [call.output.source for call in self.calls if call.operator is before]
        if source is not None and source not in passing:
            raise GraphError(
                f"rows of '{source}' do not come from '{after}', which has those of {passing}; name"
                " one of these, or leave source out"
            )
        added = set(operator.provides({})) - {ERROR, DROP_REASON}
        for later in self._behind(after):
            if twice := sorted(added & set(self.operators[later].provides({}))):
                raise GraphError(
                    f"'{operator.name}' cannot stand behind '{after}': it writes column"
                    f" '{twice[0]}', which '{later}' writes further on; rename one of the two, or"
                    f" remove '{later}'"
                )
        return self._anew(behind=(after, operator, source))

    def remove(self, name: str) -> "Graph":
        """A new graph without the operator called `name`, checked anew; this one stays as it is.

        Its readers read what it read. It is refused where one of them needs a column that it
        wrote.
        """
        gone = self._known(name, "remove")
        calls = [call for call in self.calls if call.operator is gone]
        if gone.kind == "source":
            raise GraphError(
                f"'{name}' is a source, and nothing would come in its place; swap it:"
                f" g.swap('{name}', ...)"
            )
        if gone.kind == "sink":
            read = [stream.node for call in calls for stream in call.inputs]
            raise GraphError(
                f"'{name}' is a sink: without it nobody reads the rows of {read}; declare the graph"
                " without them"
            )
        if any(len(call.inputs) > 1 for call in calls):
            joined = [stream.node for call in calls for stream in call.inputs]
            raise GraphError(
                f"'{name}' joins the streams of {joined}, and its readers have one input each;"
                " remove one of these"
            )
        if any(
            ROLLOUT_ID in c.output.columns and ROLLOUT_ID not in c.inputs[0].columns for c in calls
        ):
            raise GraphError(
                f"'{name}' makes rollouts of prompts, and what stands behind it takes rollouts;"
                f" swap it: g.swap('{name}', ...)"
            )
        lost = {
            column
            for call in calls
            for column in call.output.columns
            if column not in call.inputs[0].columns
        }
        behind = self._behind(name)
        for reader in (call.operator for call in self.calls if call.operator.name in behind):
            if needed := [column for column in reader.reads() if column in lost]:
                raise GraphError(
                    f"'{name}' cannot be removed: '{reader.name}' reads column '{needed[0]}', which"
                    f" '{name}' writes; remove '{reader.name}' before it, or swap '{name}' for one"
                    f" that writes '{needed[0]}'"
                )
        return self._anew(without=name)

    def _known(self, name: str, wish: str) -> Operator:
        """The operator of that name. GraphError without one."""
        if name not in self.operators:
            raise GraphError(
                f"there is no operator '{name}' to {wish}; the graph has {list(self.operators)}"
                f"{nearest(name, self.operators)}"
            )
        return self.operators[name]

    def _behind(self, name: str) -> set[str]:
        """All nodes that rows of this node reach."""
        import networkx

        edges = [(s.node, call.operator.name) for call in self.calls for s in call.inputs]
        return set(networkx.descendants(networkx.DiGraph(edges), name))

    def _anew(
        self,
        *,
        instead: Mapping[str, Operator] | None = None,
        behind: tuple[str, Operator, str | None] | None = None,
        without: str = "",
        bounds: Mapping[str, Any] | None = None,
    ) -> "Graph":
        """The same declaration, call by call, with this change, and checked. instead: other
        operators, by name.

        behind: after which node another operator is applied, and to rows of which source. without:
        a node whose output is its input. bounds: other max_staleness, by reader.
        """
        graph, replacements = Graph(self.name), instead or {}
        streams: dict[tuple[str, str], Stream[Any]] = {}
        for call in self.calls:
            current = replacements.get(call.operator.name, call.operator)
            if (
                isinstance(current, Generate)
                and current.asks is not None
                and current.asks.name in replacements
            ):
                current = current.asking(replacements[current.asks.name])
            inputs_now = [streams[s.node, s.source] for s in call.inputs]
            inputs = (
                tuple({stream.node: stream for stream in inputs_now}.values())
                if without
                else tuple(inputs_now)
            )
            if current.name == without or (
                without and isinstance(current, Join) and len(inputs) == 1
            ):
                output = inputs[0]
            elif isinstance(current, Source):
                output = graph.source(current)
            elif isinstance(current, Join):
                output = graph.merge(inputs)
            else:
                output = graph.apply(current, inputs[0])
            if (
                behind is not None
                and current.name == behind[0]
                and behind[2] in (None, output.source)
            ):
                output = graph.apply(behind[1], output)
            streams[call.output.node, call.output.source] = output
        for feedback in self.feedbacks:
            if feedback.reader.name == without:
                continue
            trainer: Any = replacements.get(feedback.weights.trainer.name, feedback.weights.trainer)
            reader = replacements.get(feedback.reader.name, feedback.reader)
            bound: dict[str, Any] = {
                "max_staleness": (bounds or {}).get(reader.name, feedback.max_staleness)
            }
            if feedback.refresh:
                bound = {"every": feedback.refresh.every}
            graph.feedback(dataclasses.replace(feedback.weights, trainer=trainer), reader, **bound)
        graph.check()
        return graph

    def check(self) -> None:
        """Refuse the graph (GraphError) for the first thing that could not work; see
        dataflow.check.
        """
        check(self)

    def draw(self, path: str | Path, plan: "Plan | None" = None) -> Path:
        """Draw it as .svg, .dot, .mmd or .html; a plan adds device groups, as frames, and how
        weights travel.
        """
        from dataflow.draw import draw

        graph = self.nx
        for (trainer, reader), executor in (plan.executors() if plan else {}).items():
            graph.edges[trainer, reader, "weights"]["executor"] = executor
        return draw(graph, Path(path), frames=plan.frames() if plan else None, title=self.name)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from dataflow.draw import mimebundle

        return mimebundle(self.nx, title=self.name)

    def _upstream(self, stream: Stream[Any]) -> set[str]:
        reached: set[str] = set()
        todo = [stream]
        while todo:
            current = todo.pop()
            if current.node not in reached:
                reached.add(current.node)
                todo += self._inputs.get((current.node, current.source), ())
        return reached

    def _add(self, operator: Operator) -> None:
        if not isinstance(operator, Operator):
            raise GraphError(
                f"an operator is wanted, but got {_describe(operator)}; see CONTRIBUTING.md"
            )
        namesake = self.operators.get(operator.name)
        if namesake is not None and namesake.identity() != operator.identity():
            raise GraphError(
                f"two operators are called '{operator.name}', {_describe(namesake)} and"
                f" {_describe(operator)}; "
                f'give one of them another name, as in name="{operator.name}_2"'
            )
        if namesake is None:
            if not operator.name.replace("-", "_").isidentifier():
                raise GraphError(
                    f"an operator's name becomes a column and a file, but {operator.name!r} cannot;"
                    " use letters, digits, '-' and '_'"
                )
            for fault in operator.faults():
                raise GraphError(fault)
            if isinstance(operator, Generate) and operator.asks is not None:
                self._add(operator.asks)
            self.operators[operator.name] = operator

    def _record(
        self, operator: Operator, inputs: tuple[Stream[Any], ...], output: Stream[Any]
    ) -> Stream[Any]:
        self.calls.append(Call(operator, inputs, output))
        self._inputs[operator.name, output.source] = inputs
        return output

    def _check_columns(self, operator: Operator, stream: Stream[Any]) -> None:
        for column, annotation in operator.reads().items():
            if column not in stream.columns:
                raise GraphError(missing_column(self, operator, column, stream))
            if not fits(stream.columns[column], annotation):
                raise GraphError(wrong_type(operator, column, stream, annotation))


def _describe(value: Any) -> str:
    if isinstance(value, Operator):
        return f"{type(value).__name__}(name='{value.name}')"
    if isinstance(value, Stream | Weights):
        return f"a {type(value).__name__}"
    return f"{type(value).__name__} {value!r:.60}"
