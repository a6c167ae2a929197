"""Knobs that may change while a run goes on: how an operator says which, and whether a value is of
their kind.
"""

import dataclasses
import functools
import json
import operator
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from dataflow.errors import GraphError

T = TypeVar("T")
_MARK = "settable"
INFINITE = "inf"
"""A number that JSON does not have, as it travels."""

STEP = "from the next step on"
GROUP = "for every group that starts from then on; one that has started keeps what it began with"
RESTART = "its process starts again with it, as for a swap"

_ANYTHING = "anything"
_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "none",
}
_NAMED = {name: kind for kind, name in _NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class Settable:
    """One knob that may change."""

    value: Any
    """As it was declared."""
    at: str
    """From when on another value counts, for people."""
    kind: Any = Any
    """Its annotation."""

    def taken(self, value: Any, node: str, knob: str) -> Any:
        """Another value, as the knob has it. GraphError where it is of another kind."""
        try:
            return fitted(value, self.kind)
        except ValueError as error:
            raise GraphError(
                f"'{node}' has {knob}={self.value!r} and cannot take {value!r:.60}; give {error}"
            ) from error

    def to_plain(self) -> dict[str, Any]:
        """For JSON. Raises ValueError for a kind of which JSON has no values."""
        return {"value": plain_value(self.value), "at": self.at, "kind": plain_kind(self.kind)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Settable":
        """What `to_plain` gave."""
        kind = kind_of(plain["kind"])
        return cls(value=fitted(plain["value"], kind), at=plain["at"], kind=kind)


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


def settable_fields(declared: Any) -> dict[str, Settable]:
    """Those of an operator's fields that may change."""
    marked = [field for field in dataclasses.fields(declared) if _MARK in field.metadata]
    kinds = typing.get_type_hints(type(declared)) if marked else {}
    return {
        field.name: Settable(
            value=getattr(declared, field.name), at=field.metadata[_MARK], kind=kinds[field.name]
        )
        for field in marked
    }


def settable_parameters(
    values: Mapping[str, Any], annotations: Mapping[str, Any], at: str
) -> dict[str, Settable]:
    """Knobs of a function, by name: of a kind that JSON has, as their annotation or their value
    tells.
    """
    settable = {}
    for name, value in values.items():
        kind = annotations.get(name, type(value))
        kind = type(value) if isinstance(kind, str) else kind
        if isinstance(value, bool | int | float | str) or value is None:
            settable[name] = Settable(value=value, at=at, kind=Any if kind is type(None) else kind)
    return settable


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


def plain_kind(kind: Any) -> Any:
    """A kind as JSON has it: its name, or of several a list. Raises ValueError for one of which
    JSON has no values.

    >>> plain_kind(int | None), kind_of(["a whole number", "none"])
    (['a whole number', 'none'], int | None)
    """
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [plain_kind(member) for member in typing.get_args(kind)]
    if typing.get_origin(kind) is Literal:
        return {"one of": list(typing.get_args(kind))}
    if kind is not Any and kind not in _NAMES:
        raise ValueError(f"{kind}")
    return _NAMES.get(kind, _ANYTHING)


def kind_of(plain: Any) -> Any:
    """What `plain_kind` gave."""
    if isinstance(plain, dict):
        return typing.cast(Any, Literal)[tuple(plain["one of"])]
    if isinstance(plain, list):
        return functools.reduce(operator.or_, map(kind_of, plain))
    return Any if plain == _ANYTHING else _NAMED[plain]


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
    if kind not in _NAMES:
        raise ValueError(f"a {getattr(kind, '__name__', kind)}")
    if kind is float and value == INFINITE:
        return float("inf")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ValueError(_NAMES[kind])
    return value


def _any_of(value: Any, kinds: tuple[Any, ...]) -> Any:
    expectations = []
    # a whole number stays one where it may
    for kind in sorted(kinds, key=lambda kind: kind is float):
        try:
            return fitted(value, kind)
        except ValueError as error:
            expectations.append(str(error))
    raise ValueError(" or ".join(expectations))


def _tuple(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("a list")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(fitted(part, kinds[0]) for part in value)
    if len(value) != len(kinds):
        raise ValueError(f"a list of {len(kinds)}")
    return tuple(fitted(part, kind) for part, kind in zip(value, kinds, strict=True))
