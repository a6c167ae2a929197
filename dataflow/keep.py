"""`@keep`: turns a function over the columns of a group into a filter; groups it says False of are
dropped.
"""

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, ParamSpec, overload

import pyarrow as pa

from dataflow.errors import GraphError
from dataflow.node import Traits
from dataflow.records import DROP_REASON, ERROR, Columns
from dataflow.runtime import Context, Runtime
from dataflow.scorer import DEFAULT_MEMORY_MB, DEFAULT_RETRIES, DEFAULT_TIMEOUT_S, Per, Scorer

P = ParamSpec("P")


@dataclass(frozen=True, eq=False, kw_only=True)
class Keep(Scorer[P, bool]):
    """A filter as an operator: it passes every group on, those that it drops with its name as their
    `drop_reason`.

    The trainer leaves these out, counts them under that reason, and asks for others in their place.
    """

    may_not_apply: ClassVar[bool] = False
    per: Per = "group"
    """Groups are dropped whole, so it is called once per group, with the columns of its good
    rows."""

    def __post_init__(self) -> None:
        if self.per != "group":
            raise GraphError(
                f"a filter drops whole groups, but @keep got per={self.per!r}; leave `per` out, and"
                " where single rollouts are bad, let a @scorer give them reward 0 or raise"
            )
        super().__post_init__()
        annotated = self.function.__annotations__.get("return", Any) is not Any
        if annotated and not (
            self.signature.is_broadcast and pa.types.is_boolean(self.signature.output)
        ):
            raise GraphError(
                f"filter '{self.name}' ({self.where}) returns"
                f" {self.function.__annotations__['return']!r}, but a filter says of the whole"
                " group whether to keep it; annotate it -> bool, and return one"
            )
        says = dataclasses.replace(self.signature, output=pa.bool_(), is_broadcast=True)
        object.__setattr__(self, "signature", says)

    @property
    def traits(self) -> Traits:
        """A filter may look at a single rollout."""
        return Traits()

    def identity(self) -> Hashable:
        """As a scorer's, but of another kind."""
        return ("keep", super().identity())

    def provides(self, columns: Columns) -> Columns:
        """Its input's columns, `error` where failures are recorded, and `drop_reason`, which
        filters share.
        """
        return {**columns, ERROR: pa.string(), DROP_REASON: pa.string()}

    def faults(self) -> list[str]:
        """None: what it reads it does not write."""
        return []

    def build(self, context: Context) -> Runtime:
        """Its runtime; forks the pool's server where it is isolated."""
        from dataflow.scoring.runtime import Filtering

        return Filtering(self, context)


@overload
def keep(function: Callable[P, bool], /) -> Keep[P]: ...


@overload
def keep(
    *,
    name: str = "",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    memory_mb: int | None = DEFAULT_MEMORY_MB,
    concurrency: int = 1,
    processes: int = 1,
    isolate: bool = True,
    retries: int = DEFAULT_RETRIES,
    world: tuple[type[BaseException], ...] = (),
) -> Callable[[Callable[P, bool]], Keep[P]]: ...


def keep(function: Callable[..., Any] | None = None, /, **limits: Any) -> Any:
    """Make a filter of a function: `@keep`, or `@keep(isolate=False, ...)`.

    Its parameters are columns and knobs as a scorer's (see `scorer`, per="group"): it gets the rows
    of a group that have no error, a numpy array for a column of numbers and a list for any other.
    It returns True to keep the group and False to drop it. The name under which groups are dropped
    is the function's. Where several filters stand in a row, the first that drops a group names the
    reason, and those behind it are not asked. Anything but a bool, an exception, a call longer than
    `timeout_s` or a process that ends become the `error` of the group's rows, and the trainer drops
    the group as "failed". Raises GraphError for a function that cannot be one.

    >>> from dataflow import Array, keep
    >>> @keep(isolate=False)
    ... def undecided(reward: Array) -> bool:
    ...     return reward.max() > reward.min()
    >>> undecided.name, list(undecided.reads())
    ('undecided', ['reward'])
    """
    if function is not None:
        return Keep(function=function)

    def decorate(function: Callable[..., bool]) -> Keep[...]:
        return Keep(function=function, **limits)

    return decorate
