"""The two kinds of edge as two Python types: rows (Stream) and parameters (Weights); and join."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from dataflow.errors import GraphError
from dataflow.node import Context, Learn, Operator, Runtime
from dataflow.records import ROLLOUT_ID, Columns

if TYPE_CHECKING:
    from dataflow.graph import Graph


class Prompt:
    """Row type of a stream of prompts (columns: records.PROMPT_COLUMNS)."""


class Rollout(Prompt):
    """Row type of a stream of rollouts (columns: records.ROLLOUT_COLUMNS)."""


R_co = TypeVar("R_co", bound=Prompt, covariant=True)


@dataclass(frozen=True)
class Stream(Generic[R_co]):
    """Rows that leave `node`, all from the source `lane`.

    >>> from dataflow import Graph
    >>> from dataflow.testing import FakePrompts
    >>> prompts = Graph("tiny").source(FakePrompts())
    >>> prompts.node, "prompt" in prompts.columns
    ('prompts', True)
    """

    graph: "Graph"
    node: str
    lane: str
    columns: Columns

    def __repr__(self) -> str:
        return f"Stream('{self.node}' of '{self.lane}': {list(self.columns)})"


@dataclass(frozen=True)
class Weights:
    """The parameters that an operator trains.

    >>> from dataflow import Model
    >>> from dataflow.testing import FakeTrainer
    >>> FakeTrainer(model=Model("policies/tiny")).weights.trainer.name
    'trainer'
    """

    trainer: Learn


@dataclass(frozen=True, eq=False)
class Join(Operator):
    """Brings branches of one stream together again: rows of equal rollout_id become one row with all columns."""

    light: ClassVar[bool] = True

    def build(self, context: Context) -> Runtime:
        """The barrier between the branches."""
        from dataflow.scoring.joining import JoinRuntime

        return JoinRuntime(context)


def join(first: Stream[Any], *others: Stream[Any]) -> Stream[Rollout]:
    """One stream with the columns of all; its rows appear once every branch has delivered them.

    Raises GraphError when the streams come from different sources or graphs, or disagree on a column's type.

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
    for other in others:
        if other.graph is not first.graph:
            raise GraphError(
                f"join got streams of two graphs, '{first.graph.name}' and '{other.graph.name}'; "
                f"build all of them with one Graph"
            )
        if other.lane != first.lane:
            raise GraphError(
                f"join got rows of two sources, '{first.lane}' and '{other.lane}', which never meet; "
                f"join branches of one stream"
            )
    for stream in streams:
        if ROLLOUT_ID not in stream.columns and len(streams) > 1:
            raise GraphError(
                f"join needs rollouts, but '{stream.node}' sends prompts; apply a generator before the join"
            )
    if len(streams) == 1:
        return first
    return first.graph.merge(streams)
