"""Reads a scorer's function: which parameters are columns, which are knobs, and what type it
returns.
"""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dataflow.annotations import admits_none, arrow_type
from dataflow.errors import GraphError

_MUTABLE = (list, dict, set, bytearray)
_NUMBERS = pa.list_(pa.float32())
NOTED = pa.struct([pa.field("value", pa.float64()), pa.field("note", pa.string())])
"""The columns of a function that returns `Noted`."""


class Noted(NamedTuple):
    """A number and a note: written as columns `<name>` and `<name>_note`."""

    value: float | None
    """None: it does not apply."""
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What a scorer's function reads, takes and returns."""

    name: str
    """The function's name."""
    annotations: Mapping[str, Any]
    """Its columns, as annotated, without `| None`; Any where they are not."""
    reads: Mapping[str, Any]
    """Its columns, with what one row of each must fit."""
    takes_none: frozenset[str]
    """Columns of which it accepts null, as they are annotated `X | None`; a null in any other
    column means that it does not apply."""
    defaults: Mapping[str, Any]
    """Its knobs."""
    output: pa.DataType
    """Arrow type of one row's score."""
    is_broadcast: bool
    """Whether one value that is returned for several rows stands for each of them."""
    is_async: bool
    """Whether it is a coroutine function."""


def decorated(make: Callable[..., Any], function: Any, limits: Mapping[str, Any]) -> Any:
    """What a decorator gives that is written bare, above a function, or with limits, and then gets
    the function later.
    """
    if function is not None:
        return make(function=function)
    return lambda function: make(function=function, **limits)


def stand_for(operator: Any, function: Any) -> None:
    """Give a frozen operator the names and the docstring of its function."""
    for attribute in ("__doc__", "__name__", "__qualname__", "__module__"):
        object.__setattr__(operator, attribute, getattr(function, attribute, None))
    object.__setattr__(operator, "__wrapped__", function)


def where_defined(function: Any) -> str:
    """File and line of a function, as file.py:12."""
    code = code_of(function)
    if code is None:
        return getattr(function, "__module__", None) or "no Python source"
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def code_of(function: Any) -> CodeType | None:
    """The code of a function, of what it wraps, or of what an object does when it is called."""
    unwrapped = inspect.unwrap(getattr(function, "func", function))
    for candidate in (unwrapped, getattr(type(unwrapped), "__call__", None)):  # noqa: B004
        code = getattr(
            inspect.unwrap(candidate) if callable(candidate) else candidate, "__code__", None
        )
        if isinstance(code, CodeType):
            return code
    return None


def shaped(
    function: Any, reads: Mapping[str, Any], returns: Any, *others: inspect.Parameter
) -> Any:
    """A function of any keywords as one that reads these columns, of these types; others: its other
    parameters.
    """
    columns = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
        for name, kind in reads.items()
    ]
    function.__signature__ = inspect.Signature([*columns, *others], return_annotation=returns)
    function.__annotations__ = {**reads, "return": returns}
    return function


def read_signature(
    function: Callable[..., Any], *, has_lists: bool, takes_rest: bool = False
) -> Signature:
    """Its signature; GraphError where it cannot be a scorer.

    has_lists: whether it is called with several rows at once. takes_rest: whether it may have a
    parameter `**columns`.
    """
    head = _function_head(function)
    hints = _hints(function, head)
    columns: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if takes_rest and parameter.kind is parameter.VAR_KEYWORD:
            continue
        _check_parameter(parameter, head)
        if parameter.default is parameter.empty:
            columns[parameter.name] = hints.get(parameter.name, Any)
        else:
            defaults[parameter.name] = parameter.default
    if not columns:
        raise GraphError(
            f"{head} reads no column: its parameters are {list(defaults)}, and defaults make them"
            " knobs; add a parameter without one, such as 'completion'"
        )
    returned = _plain(hints.get("return", Any))
    output, is_broadcast = _group_output(returned) if has_lists else (_row_output(returned), False)
    if output is None:
        raise GraphError(
            f"{head} returns {hints.get('return')!r}, which is no column type; "
            "annotate it -> float, int, bool, str, Array or list[float]"
        )
    return Signature(
        name=function.__name__,
        annotations={name: _plain(kind) for name, kind in columns.items()},
        reads={name: _row_of(kind) if has_lists else kind for name, kind in columns.items()},
        takes_none=frozenset(
            name for name, kind in columns.items() if _admits_none(kind, has_lists)
        ),
        defaults=defaults,
        output=output,
        is_broadcast=is_broadcast,
        is_async=inspect.iscoroutinefunction(function),
    )


def _function_head(function: Any) -> str:
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise GraphError(
            f"@scorer needs a function, but got {function!r}; write `def name(columns): ...`, "
            "and give its knobs where it is applied"
        )
    head = f"scorer '{function.__name__}' ({where_defined(function)})"
    if function.__name__ == "<lambda>":
        raise GraphError(
            f"@scorer got a lambda ({where_defined(function)}), which has no name to call a column"
            " by; write it with def"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise GraphError(
            f"{head} is a generator, but a scorer gives one answer per call; return it, do not"
            " yield"
        )
    return head


def _check_parameter(parameter: inspect.Parameter, head: str) -> None:
    shown = str(parameter).split(":")[0].split("=")[0].strip()
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise GraphError(
            f"{head} has the parameter '{shown}', which names no column; name each column that it"
            " reads"
        )
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise GraphError(
            f"{head} takes '{shown}' by position only, but columns come by name; drop the '/'"
        )
    if isinstance(parameter.default, _MUTABLE):
        raise GraphError(
            f"{head} has the knob '{shown}' with a {type(parameter.default).__name__} as its"
            " default, which calls would share and change; use a tuple or None"
        )


def _hints(function: Callable[..., Any], head: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception as error:
        raise GraphError(
            f"{head} has an annotation that cannot be read ({type(error).__name__}: {error}); "
            "import the name where the module really runs, or leave the annotation out"
        ) from error


def _plain(annotation: Any) -> Any:
    """The annotation without `| None`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return inner[0] if len(inner) == 1 else annotation
    return annotation


def _admits_none(annotation: Any, has_lists: bool) -> bool:
    """Whether it is `X | None`, or, of several rows, `list[X | None]`."""
    arguments = typing.get_args(annotation)
    is_list = has_lists and typing.get_origin(annotation) is list and bool(arguments)
    return admits_none(annotation) or (is_list and admits_none(arguments[0]))


def _is_array(annotation: Any) -> bool:
    return annotation is np.ndarray or typing.get_origin(annotation) is np.ndarray


def _items(annotation: Any) -> Any:
    """X of list[X]; None for anything else."""
    arguments = typing.get_args(annotation)
    return _plain(arguments[0]) if typing.get_origin(annotation) is list and arguments else None


def _row_of(annotation: Any) -> Any:
    """What one row must fit, where a group's column is annotated so."""
    item = _items(_plain(annotation))
    return annotation if item is None else item


def _row_output(annotation: Any) -> pa.DataType | None:
    if annotation is Any:
        return pa.float64()
    if annotation is Noted:
        return NOTED
    if _is_array(annotation) or _items(annotation) is float:
        return _NUMBERS
    if isinstance(annotation, type) and issubclass(annotation, np.generic):
        kinds = ((np.floating, pa.float64()), (np.integer, pa.int64()), (np.bool_, pa.bool_()))
        return next((kind for base, kind in kinds if issubclass(annotation, base)), None)
    kind = arrow_type(annotation)
    return None if kind is None or pa.types.is_binary(kind) else kind


def _group_output(annotation: Any) -> tuple[pa.DataType | None, bool]:
    if annotation is Any or _is_array(annotation):
        return pa.float64(), False
    item = _items(annotation)
    return (_row_output(annotation), True) if item is None else (_row_output(item), False)
