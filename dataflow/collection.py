"""`collect(stream)`: run a graph up to a stream and return its rows, for notebooks and tests."""

import collections
import itertools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa

from dataflow.errors import GraphError, checked
from dataflow.graph import Graph
from dataflow.node import Sink, Source
from dataflow.records import GROUP_ID, POSITION, schema
from dataflow.runner import make_plan
from dataflow.runtime import Batch, Context, Runtime
from dataflow.scheduler.inline import InlineRun
from dataflow.scoring.joining import Join
from dataflow.stream import Stream
from dataflow.worker.host import Settings


@checked
def collect(stream: Stream[Any], *, rows: int, seed: int = 0) -> pa.Table:
    """The first `rows` rows of a stream, in the order of their groups; fewer where the prompts end
    before.

    Runs the operators upstream inline, with the weights they start from; nothing is written to
    disk.

    >>> from dataflow import Graph, collect
    >>> from dataflow.testing import FakeGenerator, FakePrompts
    >>> rollouts = FakeGenerator(group_size=2)(Graph("tiny").source(FakePrompts()))
    >>> collect(rollouts, rows=3).column("completion").to_pylist()
    ['0', '0', '1']
    """
    if rows < 1:
        raise GraphError(f"collect needs at least 1 row, but rows is {rows}; give a number above 0")
    graph, sink = _upstream(stream)
    running = InlineRun(graph, make_plan(graph, one_process=True), Settings(folder="", seed=seed))
    try:
        running.start()
        running.run(until=lambda: sink.count() >= rows)
    finally:
        running.close()
    table = pa.Table.from_batches(sink.batches, schema(stream.columns))
    keys = [(name, "ascending") for name in (GROUP_ID, POSITION) if name in stream.columns]
    return table.sort_by(keys).slice(0, rows)


@dataclass(frozen=True, eq=False)
class _Collect(Sink):
    """Keeps the rows that arrive."""

    light: ClassVar[bool] = True
    batches: list[pa.RecordBatch] = field(default_factory=list, repr=False)

    def count(self) -> int:
        """Rows of the first groups that are all there: later groups may have come before a slow
        one.
        """
        sizes = collections.Counter(
            itertools.chain.from_iterable(
                batch.column(GROUP_ID).to_pylist() for batch in self.batches
            )
        )
        return sum(
            sizes[group] for group in itertools.takewhile(sizes.__contains__, itertools.count())
        )

    def build(self, context: Context) -> Runtime:
        return _Keep(self.batches)


class _Keep(Runtime):
    """Takes rows without end; the run stops when there are enough."""

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self._batches = batches

    def room(self) -> int:
        return 1 << 20

    def push(self, batch: Batch) -> None:
        self._batches.append(batch.records)
        batch.ack()


def _upstream(stream: Stream[Any]) -> tuple[Graph, _Collect]:
    """The graph upstream of a stream, with a sink at its end."""
    whole = stream.graph
    assert isinstance(whole, Graph)
    needed = {(stream.node, stream.source)}
    for call in reversed(whole.calls):
        if (call.output.node, call.output.source) in needed:
            needed |= {(s.node, s.source) for s in call.inputs}
    graph, sink = Graph(whole.name), _Collect(name="collect")
    streams: dict[tuple[str, str], Stream[Any]] = {}
    for call in whole.calls:
        key = (call.output.node, call.output.source)
        if key not in needed:
            continue
        inputs = tuple(streams[s.node, s.source] for s in call.inputs)
        if isinstance(call.operator, Source):
            streams[key] = graph.source(call.operator)
        elif isinstance(call.operator, Join):
            streams[key] = graph.merge(inputs)
        else:
            streams[key] = graph.apply(call.operator, inputs[0])
    sink(streams[stream.node, stream.source])
    return graph, sink
