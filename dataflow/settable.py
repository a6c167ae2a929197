"""Knobs that may change while a run goes on: how an operator says which, and whether a value is of their kind."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")
_MARK = "settable"
INFINITE = "inf"
"""A number that JSON does not have, as it travels."""

STEP = "from the next step on"
GROUP = "for every group that starts from then on; one that has started keeps what it began with"
RESTART = "its process starts again with it, as for a swap"


@dataclass(frozen=True, kw_only=True)
class Settable:
    """One knob that may change."""

    value: Any
    """As it was declared."""
    at: str
    """From when on another value counts, for people."""
    kind: Any = Any
    """Its annotation."""


def settable(default: T, *, at: str) -> T:
    """A field of an operator, with this default, that may change while a run goes on.

    >>> from dataclasses import dataclass
    >>> from dataflow.node import Transform
    >>> @dataclass(frozen=True, eq=False, kw_only=True)
    ... class Shout(Transform):
    ...     loudness: float = settable(1.0, at=STEP)
    >>> Shout().settable()
    {'loudness': Settable(value=1.0, at='from the next step on', kind=<class 'float'>)}
    """
    return dataclasses.field(default=default, metadata={_MARK: at})  # type: ignore[return-value,no-any-return,unused-ignore]


def settable_fields(operator: Any) -> dict[str, Settable]:
    """Those of its fields that may change."""
    marked = [each for each in dataclasses.fields(operator) if _MARK in each.metadata]
    kinds = typing.get_type_hints(type(operator)) if marked else {}
    return {
        each.name: Settable(value=getattr(operator, each.name), at=each.metadata[_MARK], kind=kinds[each.name])
        for each in marked
    }


def settable_parameters(values: Mapping[str, Any], annotations: Mapping[str, Any], at: str) -> dict[str, Settable]:
    """Knobs of a function, by name: of a kind that JSON has, as their annotation or their value tells."""
    found = {}
    for name, value in values.items():
        kind = annotations.get(name, type(value))
        kind = type(value) if isinstance(kind, str) else kind
        if isinstance(value, bool | int | float | str) or value is None:
            found[name] = Settable(value=value, at=at, kind=Any if kind is type(None) else kind)
    return found


def read_value(text: str) -> Any:
    """What somebody has typed: JSON, or a text that needs no quotes.

    >>> [read_value(text) for text in ("3e-6", "true", "none", "inf", "cosine")]
    [3e-06, True, None, 'inf', 'cosine']
    """
    plain = text.strip()
    words = {"true": True, "false": False, "none": None, "null": None}
    if plain.lower() in words:
        return words[plain.lower()]
    try:
        return json.loads(plain)
    except ValueError:
        return plain


def plain_value(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, float) and value == float(INFINITE):
        return INFINITE
    return list(value) if isinstance(value, tuple) else value


def fitted(value: Any, kind: Any) -> Any:
    """The value as one of this kind. Raises ValueError, which names the kind.

    >>> fitted(1, float), fitted([1, "END"], tuple[str | int, ...]), fitted(None, int | None)
    (1.0, (1, 'END'), None)
    >>> fitted("1", float)
    Traceback (most recent call last):
    ValueError: a number
    """
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _any_of(value, inside)
    if origin is Literal:
        if value not in inside:
            raise ValueError(f"one of {list(inside)}")
        return value
    if origin is tuple:
        return _tuple(value, inside)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "none"}
    if kind not in names:
        raise ValueError(f"a {getattr(kind, '__name__', kind)}")
    if kind is float and value == INFINITE:
        return float("inf")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ValueError(names[kind])
    return value


def _any_of(value: Any, kinds: tuple[Any, ...]) -> Any:
    wanted = []
    for kind in sorted(kinds, key=lambda kind: kind is float):  # a whole number stays one where it may
        try:
            return fitted(value, kind)
        except ValueError as error:
            wanted.append(str(error))
    raise ValueError(" or ".join(wanted))


def _tuple(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("a list")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(fitted(each, kinds[0]) for each in value)
    if len(value) != len(kinds):
        raise ValueError(f"a list of {len(kinds)}")
    return tuple(fitted(each, kind) for each, kind in zip(value, kinds, strict=True))
