"""`@scorer`: turns a function into an operator that reads its parameters as columns and writes its
name.
"""

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast, overload

from dataflow.errors import GraphError
from dataflow.node import Weights
from dataflow.runtime import Context, Runtime
from dataflow.scoring.knobs import (
    DEFAULT_MEMORY_MB,
    DEFAULT_RETRIES,
    DEFAULT_TIMEOUT_S,
    Per,
    ScorerKnobs,
)
from dataflow.stream import Rollout, Stream

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class Scorer(ScorerKnobs[P, T_co]):
    """A function as an operator: applied to a stream it adds a column, called with values it is
    itself.
    """

    @overload
    def __call__(self, stream: Stream[Any], **knobs: Any) -> Stream[Rollout]: ...

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply it to a stream, with knobs by keyword; or call the plain function with plain
        values.
        """
        stream = args[0] if args else kwargs.get("stream")
        if isinstance(stream, Weights):
            raise GraphError(
                f"'{self.name}' ({self.where}) takes rows, but got the weights of"
                f" '{stream.trainer.name}'; give weights to g.feedback(...)"
            )
        if not isinstance(stream, Stream):
            return cast(Callable[..., Any], self.function)(*args, **{**self.given_knobs, **kwargs})
        if len(args) > 1:
            raise GraphError(
                f"'{self.name}' ({self.where}) takes one stream, but got {len(args)} positional"
                " arguments; give knobs by name, and bring several streams together with join(...)"
                " first"
            )
        if not args:
            kwargs.pop("stream")
        return stream.graph.apply(self.configured(**kwargs), stream)

    def configured(self, **knobs: Any) -> "Scorer[P, T_co]":
        """The same scorer with other knobs; GraphError for a knob that the function does not
        have.
        """
        for knob in knobs:
            if knob not in self.signature.defaults:
                raise GraphError(self._unknown(knob))
        return (
            dataclasses.replace(self, given_knobs={**self.given_knobs, **knobs}) if knobs else self
        )

    def renamed(self, name: str) -> "Scorer[P, T_co]":
        """The same scorer writing another column."""
        return dataclasses.replace(self, name=name)

    def build(self, context: Context) -> Runtime:
        """Its runtime; forks the pool's server where it is isolated."""
        from dataflow.scoring.runtime import build

        return build(self, context)

    def _unknown(self, knob: str) -> str:
        head = f"'{self.name}' ({self.where}) has no knob '{knob}'"
        if knob in self.signature.reads:
            return (
                f"{head}: '{knob}' is a column it reads; give the parameter a default to make it a"
                " knob"
            )
        knobs_known = list(self.signature.defaults)
        nearest = difflib.get_close_matches(knob, knobs_known, n=1, cutoff=0.5)
        if nearest:
            return f"{head}, its knobs are {knobs_known}; did you mean '{nearest[0]}'?"
        return (
            f"{head}, its knobs are {knobs_known}; add a parameter '{knob}' with a default, or"
            " drop it"
            " here"
        )


@overload
def scorer(function: Callable[P, T], /) -> Scorer[P, T]: ...


@overload
def scorer(
    *,
    per: Per = "row",
    name: str = "",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    memory_mb: int | None = DEFAULT_MEMORY_MB,
    concurrency: int = 1,
    processes: int = 1,
    isolate: bool = True,
    retries: int = DEFAULT_RETRIES,
    world: tuple[type[BaseException], ...] = (),
    rest: bool = False,
) -> Callable[[Callable[P, T]], Scorer[P, T]]: ...


def scorer(function: Callable[..., Any] | None = None, /, **limits: Any) -> Any:
    """Make a scorer of a function: `@scorer`, `@scorer(per="group", ...)` or `@scorer(per="batch",
    ...)`.

    Parameters without a default are the columns it reads, those with one are knobs, its name is the
    column it writes and its return annotation the type of that column. A per-row function gets the
    values of one rollout. A per-group function gets, for the rows of a group that have no error, a
    numpy array for a column of numbers and a list for any other, and returns one value for each (or
    one for all); a per-batch function the same for all groups that arrived together.
    None says that it does not apply: the row has no value in that column, and no error. Rows in
    which a column that it reads has no value are left out, unless the parameter is annotated `X |
    None`; they have none in its own. NaN, an exception, a call longer than `timeout_s` or a process
    that ends become the row's `error`, with the cause (`dataflow.scoring.failure`); a call whose
    world failed is made again first (`retries`). Raises GraphError for a function that cannot be
    one.

    >>> from dataflow import Array, Graph, collect, scorer
    >>> from dataflow.testing import FakeGenerator, FakePrompts
    >>> @scorer(isolate=False)
    ... def reward(completion: str, answer: str, bonus: float = 1.0) -> float:
    ...     return bonus * (completion == answer)
    >>> @scorer(per="group", isolate=False)
    ... def advantage(reward: Array) -> Array:
    ...     return reward - reward.mean()
    >>> reward("7", "7", bonus=2.0)  # called with values it is the function
    2.0
    >>> rollouts = FakeGenerator(group_size=2)(Graph("tiny").source(FakePrompts()))
    >>> rows = collect(advantage(reward(rollouts, bonus=2.0)), rows=2)
    >>> rows.select(["reward", "advantage"]).to_pylist()
    [{'reward': 2.0, 'advantage': 0.0}, {'reward': 2.0, 'advantage': 0.0}]
    """
    if function is not None:
        return Scorer(function=function)

    def decorate(function: Callable[..., Any]) -> Scorer[..., Any]:
        return Scorer(function=function, **limits)

    return decorate
