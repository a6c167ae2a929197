"""A scorer's declaration, which its runtime reads: the function, its knobs, the limits of its
calls.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, ParamSpec, TypeVar

import pyarrow as pa

from dataflow.errors import GraphError
from dataflow.node import Traits, Transform
from dataflow.records import ERROR, Columns, note_column
from dataflow.scoring.signature import NOTED, Signature, read_signature, where_defined
from dataflow.settable import RESTART, Settable, settable_parameters

P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)
Per = Literal["row", "group", "batch"]

DEFAULT_TIMEOUT_S = 30.0
DEFAULT_MEMORY_MB = 1024
DEFAULT_RETRIES = 2


@dataclass(frozen=True, eq=False, kw_only=True)
class ScorerKnobs(Transform, Generic[P, T_co]):
    """A function that reads columns and writes one."""

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
        for attribute in ("__doc__", "__name__", "__qualname__", "__module__"):
            object.__setattr__(self, attribute, getattr(self.function, attribute, None))
        object.__setattr__(self, "__wrapped__", self.function)

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
            compares_siblings=self.per == "group", calls_at_once=self.concurrency * self.processes
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

    def _with(self, knob: str, value: Any) -> "ScorerKnobs[P, T_co]":
        return dataclasses.replace(self, given_knobs={**self.given_knobs, knob: value})

    def faults(self) -> list[str]:
        """A column that is both read and written."""
        if self.name not in self.reads():
            return []
        message = f"'{self.name}' ({self.where}) writes column '{self.name}', which it also reads; "
        return [message + "name it otherwise with .renamed(...)"]

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
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
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
