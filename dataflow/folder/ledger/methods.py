"""Methods that another process may call: a class of messages for each, made from its signature."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, Union, cast

import msgspec

from dataflow.system.files import plain
from dataflow.system.messages import Message, MessageError

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

JsonMap: TypeAlias = Mapping[str, Any]
"""Values that are kept as JSON."""


class Call(Message):
    """A method's name and its arguments, which are the fields of a class of its own."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method by its name."""

    function: Callable[..., Any]
    doing: str
    """Text for an error; its arguments stand in braces."""
    call: type[Call]
    result: Any
    """The type of its answer."""
    json: tuple[str, ...]
    """Arguments that are kept as JSON, and travel as plain values."""
    writes: bool = False
    is_posted: bool = False
    """Whether a client goes on before it is done, and it need not outlast a crash of the host."""
    waits_for_disk: bool = False
    """Whether a thread of its own runs it."""

    def describe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What a call with these arguments does, for an error."""
        if "{" not in self.doing:
            return self.doing
        return self.doing.format_map(msgspec.structs.asdict(self.call(*args, **kwargs)))

    def message(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call with these arguments."""
        call = self.call(*args, **kwargs)
        for name in self.json:
            call = msgspec.structs.replace(call, **{name: plain(getattr(call, name))})
        return call

    def answer(self, value: Any) -> Any:
        """The answer that travelled as a plain value. Errors: MessageError for one of another
        type.
        """
        try:
            return msgspec.convert(value, self.result)
        except msgspec.ValidationError as error:
            raise MessageError(
                f"the answer to '{self.call.__name__}' does not fit; found: {error}; run the same"
                " release on both sides"
            ) from error


METHODS: dict[str, Method] = {}
"""All of them, by name."""


def method_of(call: Call) -> Method:
    """The method that is called."""
    return METHODS[type(call).__name__]


def describe(call: Call) -> str:
    """What a call does, for an error."""
    return method_of(call).doing.format_map(msgspec.structs.asdict(call))


def run(owner: object, call: Call) -> Any:
    """Call the method of an object."""
    arguments = {name: getattr(call, name) for name in call.__struct_fields__}
    return getattr(owner, type(call).__name__)(**arguments)


def calls_of(is_one: Callable[[Method], bool]) -> Any:
    """The union of the calls of some methods, which tells them apart by their names."""
    return Union[tuple(method.call for method in METHODS.values() if is_one(method))]  # noqa: UP007


def served(
    doing: str, **traits: bool
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Mark a method that another process may call. traits: as `Method` has them."""

    def mark(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        hints = inspect.get_annotations(function, eval_str=True)
        _, *parameters = inspect.signature(function).parameters.values()
        fields: list[Any] = [
            (p.name, hints[p.name], *(() if p.default is p.empty else (p.default,)))
            for p in parameters
        ]
        METHODS[function.__name__] = Method(
            function=function,
            doing=doing,
            call=cast("type[Call]", msgspec.defstruct(function.__name__, fields, bases=(Call,))),
            result=hints["return"],
            json=tuple(p.name for p in parameters if hints[p.name] in (JsonMap, JsonMap | None)),
            **traits,
        )
        return function

    return mark


def transacted(
    doing: str, **traits: bool
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """As `served`, for a method whose object has `do(method, args, kwargs)`: it runs there, in a
    transaction, or where that has the call sent.
    """

    def mark(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        served(doing, **traits)(function)
        method = METHODS[function.__name__]

        @functools.wraps(function)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            result: T = cast(Any, self).do(method, args, kwargs)
            return result

        return cast("Callable[Concatenate[S, P], T]", call)

    return mark
