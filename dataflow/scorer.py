"""`@scorer`: turns a function into an operator that reads its parameters as columns and writes its
name.
"""

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, ParamSpec, Self, TypeVar, cast, overload

import pyarrow as pa

from dataflow.errors import GraphError, is_whole, nearest
from dataflow.node import CapacityTraits, Rollout, Stream, Traits, Transform, Weights
from dataflow.records import DROP_REASON, ERROR, Columns, note_column
from dataflow.runtime import Context, Runtime
from dataflow.scoring.signature import (
    NOTED,
    Signature,
    decorated,
    read_signature,
    stand_for,
    where_defined,
)
from dataflow.settable import RESTART, Settable, settable_parameters

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Per = Literal["row", "group", "batch"]

DEFAULT_TIMEOUT_S = 30.0
DEFAULT_MEMORY_MB = 1024
DEFAULT_RETRIES = 2


@dataclass(frozen=True, eq=False, kw_only=True)
class Scorer(Transform, Generic[P, T_co]):
    """A function as an operator: applied to a stream it adds a column, called with values it is
    itself.
    """

    light: ClassVar[bool] = True
    state: ClassVar[str | None] = "scored"
    may_not_apply: ClassVar[bool] = True
    """Whether None means that it does not apply to a row; False: None is no answer."""

    function: Callable[P, T_co] = field(repr=False)
    """The user's function."""
    per: Per = "row"
    """Called once per rollout, or once with all good rows of a group, or of all groups that arrived
    together."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Wall-clock seconds for one call, its retries included."""
    retries: int = DEFAULT_RETRIES
    """Times that a call is made again which raised WorldFailed, ConnectionError, TimeoutError or
    one of `world`; not inside the worker (isolate=False), which must not wait."""
    world: tuple[type[BaseException], ...] = ()
    """What else the function raises where something outside failed, such as
    httpx.TransportError."""
    rest: bool = False
    """Whether it also gets, by keyword, the rows' other columns, those of the engine left out."""
    memory_mb: int | None = DEFAULT_MEMORY_MB
    """Megabytes that a process of its pool may take beyond what it started with; None: no limit."""
    concurrency: int = 1
    """Calls at once within a process: threads, or tasks of an event loop for an async function."""
    processes: int = 1
    """Processes in its pool."""
    isolate: bool = True
    """Whether it runs in killable processes; False: inside the worker, with no limits, where a call
    that only waits for longer than `Limits.asleep_s` counts as a worker that is stuck."""
    given_knobs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Knobs set where it was applied."""
    signature: Signature = field(init=False, repr=False)
    """The function's parameters as columns and knobs, and the Arrow type it writes."""

    def __post_init__(self) -> None:
        signature = read_signature(self.function, has_lists=self.per != "row", takes_rest=self.rest)
        object.__setattr__(self, "signature", signature)
        if not self.name:
            object.__setattr__(self, "name", signature.name)
        super().__post_init__()
        self._check_limits()
        stand_for(self, self.function)

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
        from dataflow.scoring.runtime import Scoring

        return Scoring(self, context)

    @property
    def where(self) -> str:
        """File and line of the function."""
        return where_defined(self.function)

    @property
    def output(self) -> pa.DataType:
        """Arrow type of the column it writes."""
        return self.signature.output

    @property
    def writes(self) -> Columns:
        """Its own columns: its name, and `<name>_note` where the function gives notes."""
        if self.output != NOTED:
            return {self.name: self.output}
        return {self.name: pa.float64(), note_column(self.name): pa.string()}

    @property
    def traits(self) -> Traits:
        """A function that is called with a group compares its rollouts."""
        return Traits(
            compares_siblings=self.per == "group",
            capacity=CapacityTraits(calls_at_once=self.concurrency * self.processes),
        )

    @property
    def about(self) -> str:
        """The function's docstring."""
        return inspect.getdoc(self.function) or super().about

    def identity(self) -> Hashable:
        """The function, the name, the knobs and the limits."""
        limits = (
            self.per,
            self.timeout_s,
            self.memory_mb,
            self.concurrency,
            self.processes,
            self.isolate,
            self.retries,
            self.world,
            self.rest,
        )
        knobs = tuple(sorted((knob, _frozen(value)) for knob, value in self.given_knobs.items()))
        return (self.function, self.name, knobs, limits)

    def reads(self) -> Mapping[str, Any]:
        """Parameters without a default, with what one row of each must fit."""
        return self.signature.reads

    def provides(self, columns: Columns) -> Columns:
        """Its input's columns, `error` where failures are recorded, and its own."""
        return {**columns, ERROR: pa.string(), **self.writes}

    def knobs(self) -> dict[str, Any]:
        """The function's knobs set at the application, and limits that differ from their
        defaults.
        """
        shown = dict(self.given_knobs)
        for item in dataclasses.fields(self):
            if item.repr and item.name not in ("name", "function"):
                value = getattr(self, item.name)
                if value != item.default:
                    shown[item.name] = value
        return shown

    def settable(self) -> Mapping[str, Settable]:
        """The function's own knobs, where they are numbers or texts."""
        values = {**self.signature.defaults, **self.given_knobs}
        return settable_parameters(values, getattr(self.function, "__annotations__", {}), RESTART)

    def _with(self, knob: str, value: Any) -> Self:
        return dataclasses.replace(self, given_knobs={**self.given_knobs, knob: value})

    def faults(self) -> list[str]:
        """A column that is both read and written."""
        if self.name not in self.reads():
            return []
        message = f"'{self.name}' ({self.where}) writes column '{self.name}', which it also reads; "
        return [message + "name it otherwise with .renamed(...)"]

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

    def _check_limits(self) -> None:
        head = f"scorer '{self.name}' ({self.where})"
        if self.per not in ("row", "group", "batch"):
            raise GraphError(
                f"{head} has per={self.per!r}, which is not known; use 'row', 'group' or 'batch'"
            )
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise GraphError(
                f"{head} has retries={self.retries!r}, which must be a whole number; use 0 or more"
            )
        if not isinstance(self.world, tuple) or not all(_is_exception(kind) for kind in self.world):
            raise GraphError(
                f"{head} has world={self.world!r}; give a tuple of what it raises, such as"
                " (httpx.TransportError,)"
            )
        for knob in ("concurrency", "processes"):
            count = getattr(self, knob)
            if not is_whole(count, 1):
                raise GraphError(
                    f"{head} has {knob}={count!r}, which must be a whole number; use 1 or more"
                )
        if not isinstance(self.timeout_s, int | float) or not 0 < self.timeout_s < math.inf:
            raise GraphError(
                f"{head} has timeout_s={self.timeout_s!r}; give seconds above 0, such as 30.0"
            )
        if self.memory_mb is not None and (
            not isinstance(self.memory_mb, int) or self.memory_mb < 1
        ):
            raise GraphError(
                f"{head} has memory_mb={self.memory_mb!r}; give megabytes, or None for no limit"
            )
        if self.isolate:
            return
        if self.signature.is_async:
            raise GraphError(
                f"{head} is an async function with isolate=False, and the worker has no event loop;"
                " leave isolate=True"
            )
        if (
            self.timeout_s != DEFAULT_TIMEOUT_S
            or self.memory_mb != DEFAULT_MEMORY_MB
            or self.concurrency > 1
        ):
            raise GraphError(
                f"{head} has limits but isolate=False, and nothing can stop a call inside the"
                " worker; leave isolate=True, or drop timeout_s, memory_mb and concurrency"
            )
        if self.processes > 1:
            raise GraphError(
                f"{head} has processes={self.processes} but isolate=False; leave isolate=True"
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
    return decorated(Scorer, function, limits)


def _is_exception(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _frozen(value: Any) -> Hashable:
    """A hashable stand-in for a knob's value: equal for equal plain data, by object for anything
    else.
    """
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(_frozen(item) for item in value))
    if isinstance(value, dict):
        return ("dict", tuple((repr(key), _frozen(item)) for key, item in value.items()))
    if isinstance(value, str | bytes | int | float | bool | type(None)):
        return (type(value).__name__, value)
    return (type(value).__name__, id(value))


# Adapters for functions written for other systems, by the name before a reference.

FORMS: dict[str, Callable[[Any], Any]] = {}
"""By name: from such a function to a scorer. `operators.rewards` puts its own here when it is
imported."""


def split_form(reference: str) -> tuple[str, str]:
    """The form that a reference names, and the rest of it; no form where it has one colon or none.

    >>> split_form("trl:my_rewards:accuracy"), split_form("my_rewards:strict")
    (('trl', 'my_rewards:accuracy'), ('', 'my_rewards:strict'))
    """
    form, _, target = reference.partition(":")
    return (form, target) if ":" in target else ("", reference)


def adapt(form: str, loaded: Any) -> Any:
    """A loaded object as a scorer; unchanged where no form is named. GraphError for an unknown
    form.
    """
    if not form:
        return loaded
    if form not in FORMS:
        raise GraphError(
            f"no form of rewards is called '{form}', only {list(FORMS)}{nearest(form, FORMS)}; name"
            " one of these, and import operators.rewards in the run's program"
        )
    return FORMS[form](loaded)


# `@keep`: turns a function over the columns of a group into a filter; groups it says False of are
# dropped.


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
    return decorated(Keep, function, limits)
