"""Rows on their way through a graph as a Python type (Stream), and join; parameters are another
type (node.Weights).
"""

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from dataflow.errors import GraphError
from dataflow.records import ROLLOUT_ID, Columns


class Prompt:
    """Row type of a stream of prompts (columns: records.PROMPT_COLUMNS)."""


class Rollout(Prompt):
    """Row type of a stream of rollouts (columns: records.ROLLOUT_COLUMNS)."""


R_co = TypeVar("R_co", bound=Prompt, covariant=True)


class Builder(Protocol):
    """The graph that a stream belongs to, as far as what is applied to the stream has to know
    it.
    """

    name: str

    def apply(self, operator: Any, stream: "Stream[Any]") -> "Stream[Rollout]":
        """What `operator(stream)` does."""

    def merge(self, streams: "tuple[Stream[Any], ...]") -> "Stream[Rollout]":
        """What `join(a, b, ...)` does."""


@dataclass(frozen=True)
class Stream(Generic[R_co]):
    """Rows that leave `node`, all from the source `source`.

    >>> from dataflow import Graph
    >>> from dataflow.testing import FakePrompts
    >>> prompts = Graph("tiny").source(FakePrompts())
    >>> prompts.node, "prompt" in prompts.columns
    ('prompts', True)
    """

    graph: Builder
    node: str
    source: str
    columns: Columns

    def __repr__(self) -> str:
        return f"Stream('{self.node}' of '{self.source}': {list(self.columns)})"


def join(first: Stream[Any], *others: Stream[Any]) -> Stream[Rollout]:
    """One stream with the columns of all; its rows appear once every branch has delivered them.

    Raises GraphError when the streams come from different sources or graphs, or disagree on a
    column's type.

    >>> from dataflow import Graph, join, scorer
    >>> from dataflow.testing import FakeGenerator, FakePrompts
    >>> @scorer
    ... def short(completion: str) -> float:
    ...     return -float(len(completion))
    >>> @scorer
    ... def right(completion: str, answer: str) -> float:
    ...     return float(completion == answer)
    >>> rollouts = FakeGenerator()(Graph("tiny").source(FakePrompts()))
    >>> both = join(short(rollouts), right(rollouts))
    >>> {"short", "right"} <= set(both.columns)
    True
    """
    streams = (first, *others)
    for branch in others:
        if branch.graph is not first.graph:
            raise GraphError(
                f"join got streams of two graphs, '{first.graph.name}' and '{branch.graph.name}'; "
                "build all of them with one Graph"
            )
        if branch.source != first.source:
            raise GraphError(
                f"join got rows of two sources, '{first.source}' and '{branch.source}', which never"
                " meet; join branches of one stream"
            )
    for stream in streams:
        if ROLLOUT_ID not in stream.columns and len(streams) > 1:
            raise GraphError(
                f"join needs rollouts, but '{stream.node}' sends prompts; apply a generator before"
                " the join"
            )
    if len(streams) == 1:
        return first
    return first.graph.merge(streams)
