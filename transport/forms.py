"""How the values of each type travel in a message and are checked where they arrive: one form per
annotation.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, NamedTuple, TypeAlias

PLAIN_DEPTH = 64
"""So deep may lists and maps stand in each other in a `Plain` field."""
SHOWN = 60
"""Characters of what was found that an error shows."""

Plain: TypeAlias = Any
"""None, numbers, text, bytes, and lists and maps of them; what they mean is for the reader of the
field to check."""


@dataclass(frozen=True)
class AtLeast:
    """Marks a type of numbers: none is below this one."""

    least: int


Natural = Annotated[int, AtLeast(0)]
"""A whole number that is not negative."""


class Misfit(Exception):
    """A value that is not of its type; the path to it grows while the error rises."""

    def __init__(self, wanted: str, value: Any) -> None:
        super().__init__(wanted)
        self.wanted, self.found = wanted, shown(value)
        self.path: list[str] = []


def shown(value: Any) -> str:
    """A value, short enough for an error."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= SHOWN else text[:SHOWN] + '...'}"


class Form(NamedTuple):
    """How the values of one type travel."""

    says: str
    """The type, in an error."""
    of: type
    """Class of its values."""
    wire: type
    """Class of what travels for them."""
    lift: Callable[[Any], Any]
    """The value of what travels. Raises Misfit."""
    lower: Callable[[Any], Any] | None = None
    """What travels for a value; None where it is the value itself."""
    exact: bool = False
    """Whether all that is of the class `wire`, and not below `least`, needs no lifting."""
    least: int | None = None
    """The bound of numbers."""


def form_of(hint: Any) -> Form:
    """The form of an annotation. An assertion fails where no message carries such values."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is Any:
        return Form("a plain value", object, object, _plain)
    if origin is Annotated:
        return _bounded(form_of(arguments[0]), arguments[1])
    if origin is typing.Literal:
        return _literal(arguments)
    if origin in (types.UnionType, typing.Union):
        return _union([form_of(each) for each in arguments])
    if origin is tuple and Ellipsis not in arguments:
        return _fixed([form_of(each) for each in arguments])
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return _fixed([form_of(each) for each in typing.get_type_hints(hint).values()], hint)
    if origin in (tuple, list, Sequence):
        return _many(list if origin is list else tuple, form_of(arguments[0]))
    if origin in (dict, Mapping):
        return _map(form_of(arguments[0]), form_of(arguments[1]))
    if is_dataclass(hint):
        return record(typing.cast("type[Any]", hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    assert hint in (None, type(None), bool, int, float, str, bytes), (
        f"no message carries values of type {hint}"
    )
    return _scalar(type(None) if hint is None else hint)


def record(kind: type[Any]) -> Form:
    """The form of a frozen dataclass: a map of its fields, all of them and no other."""
    assert is_dataclass(kind) and vars(kind)["__dataclass_params__"].frozen, (
        f"{kind.__name__} is no frozen dataclass"
    )
    hints = typing.get_type_hints(kind, include_extras=True)
    forms = {each.name: form_of(hints[each.name]) for each in fields(kind)}
    lifts = [(name, form.wire if form.exact else None, form.lift) for name, form in forms.items()]
    bounds = [
        (name, form.least, form.lift) for name, form in forms.items() if form.least is not None
    ]
    names, lowers = (
        tuple(forms),
        [(name, form.lower) for name, form in forms.items() if form.lower is not None],
    )
    says = f"a map of {', '.join(forms) or 'nothing'}"

    def lower(message: Any) -> dict[str, Any]:
        plain = {name: getattr(message, name) for name in names}
        for name, lower_one in lowers:
            plain[name] = lower_one(plain[name])
        return plain

    def lift(plain: Any) -> Any:
        if type(plain) is not dict or plain.keys() != forms.keys():
            raise Misfit(says, plain)
        try:
            for name, exact, lift_one in lifts:
                if type(plain[name]) is not exact:
                    plain[name] = lift_one(plain[name])
            for name, least, lift_one in bounds:
                if plain[name] < least:
                    lift_one(plain[name])
        except Misfit as misfit:
            misfit.path.append(name)
            raise
        try:
            return kind(**plain)
        except (ValueError, TypeError) as error:  # of its __post_init__
            raise Misfit(f"a {kind.__name__} ({error})", plain) from None

    return Form(f"a {kind.__name__}", kind, dict, lift, lower)


def _inside(name: str, lift: Callable[[Any], Any], value: Any) -> Any:
    """The value of what stands at a name or a place."""
    try:
        return lift(value)
    except Misfit as misfit:
        misfit.path.append(name)
        raise


def _scalar(kind: type) -> Form:
    def lift(value: Any) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise Misfit(kind.__name__, value)

    return Form(kind.__name__, kind, kind, lift, exact=True)


def _bounded(form: Form, mark: AtLeast) -> Form:
    least, says = mark.least, f"{form.says} of at least {mark.least}"

    def lift(value: Any) -> Any:
        number = form.lift(value)
        if number < least:
            raise Misfit(says, value)
        return number

    return form._replace(says=says, lift=lift, least=least)


def _literal(values: tuple[Any, ...]) -> Form:
    says, (kind,) = f"one of {', '.join(map(repr, values))}", {type(value) for value in values}

    def lift(value: Any) -> Any:
        if type(value) is kind and value in values:
            return value
        raise Misfit(says, value)

    return Form(says, kind, kind, lift)


def _enum(kind: type[Enum]) -> Form:
    members = kind.__members__
    says = f"one of {', '.join(members)}"

    def lift(value: Any) -> Any:
        if type(value) is str and value in members:
            return members[value]
        raise Misfit(says, value)

    return Form(says, kind, str, lift, lambda member: member.name)


def _many(kind: type[list[Any]] | type[tuple[Any, ...]], one: Form) -> Form:
    says, lower_one, exact = f"a list, each {one.says}", one.lower, {one.wire}

    def lift(value: Any) -> Any:
        if type(value) is not list:
            raise Misfit(says, value)
        if not value:
            return kind()
        if (
            one.exact
            and set(map(type, value)) == exact
            and (one.least is None or min(value) >= one.least)
        ):
            return kind(value)
        return kind(_inside(str(place), one.lift, each) for place, each in enumerate(value))

    return Form(
        says,
        kind,
        list,
        lift,
        None if lower_one is None else lambda value: list(map(lower_one, value)),
    )


def _fixed(forms: list[Form], named: type[Any] | None = None) -> Form:
    says = f"a list of {', '.join(form.says for form in forms) or 'nothing'}"

    def lift(value: Any) -> Any:
        if type(value) is not list or len(value) != len(forms):
            raise Misfit(says, value)
        found = tuple(
            _inside(str(place), form.lift, each)
            for place, (form, each) in enumerate(zip(forms, value, strict=True))
        )
        return found if named is None else named(*found)

    def lower(value: Any) -> Any:
        return [
            each if form.lower is None else form.lower(each)
            for form, each in zip(forms, value, strict=True)
        ]

    return Form(says, named or tuple, list, lift, lower)


def _map(key: Form, one: Form) -> Form:
    says = f"a map of {key.says} to {one.says}"
    is_as_it_is = key.lower is None and one.lower is None

    def lift(value: Any) -> Any:
        if type(value) is not dict:
            raise Misfit(says, value)
        return {key.lift(name): _inside(str(name), one.lift, each) for name, each in value.items()}

    def lower(value: Any) -> Any:
        return {
            name if key.lower is None else key.lower(name): each
            if one.lower is None
            else one.lower(each)
            for name, each in value.items()
        }

    return Form(says, dict, dict, lift, dict if is_as_it_is else lower)


def _union(arms: list[Form]) -> Form:
    """One of several types, told apart by what travels; dataclasses, if there are two or more, by
    their names.
    """
    tagged = {arm.of.__name__: arm for arm in arms if is_dataclass(arm.of)}
    others = [arm for arm in arms if not is_dataclass(arm.of)]
    if len(tagged) > 1:
        others.append(_tagged(tagged))
    else:
        others.extend(tagged.values())
    by_wire = {arm.wire: arm for arm in others}
    assert len(by_wire) == len(others) and object not in by_wire, (
        f"one cannot tell {' or '.join(arm.says for arm in arms)} apart"
    )
    if float in by_wire:
        by_wire.setdefault(int, by_wire[float])
    says = " or ".join(arm.says for arm in others)
    by_class = {arm.of: arm.lower for arm in others if arm.lower is not None}
    by_class |= {arm.of: by_class[object] for arm in tagged.values() if len(tagged) > 1}

    def lift(value: Any) -> Any:
        arm = by_wire.get(type(value))
        if arm is None:
            raise Misfit(says, value)
        return arm.lift(value)

    def lower(value: Any) -> Any:
        lower_one = by_class.get(type(value))
        return value if lower_one is None else lower_one(value)

    return Form(says, object, object, lift, lower if by_class else None)


def _tagged(arms: dict[str, Form]) -> Form:
    """One of several dataclasses: a list of its name and its fields."""
    says = " or ".join(arm.says for arm in arms.values())

    def lift(value: Any) -> Any:
        if len(value) != 2 or type(value[0]) is not str or value[0] not in arms:
            raise Misfit(says, value)
        return arms[value[0]].lift(value[1])

    def lower(value: Any) -> Any:
        name = type(value).__name__
        lower_one = arms[name].lower
        assert lower_one is not None, "a dataclass travels as a map"
        return [name, lower_one(value)]

    return Form(says, object, list, lift, lower)


_PLAIN = {type(None), bool, int, float, str, bytes}


def _plain(value: Any, depth: int = PLAIN_DEPTH) -> Any:
    if depth == 0:
        raise Misfit(f"nested at most {PLAIN_DEPTH} deep", value)
    kind = type(value)
    if kind is dict:
        _plain(list(value), 2)
        _plain(list(value.values()), depth)
    elif kind is list:
        if depth == 1 or not set(map(type, value)) <= _PLAIN:
            for each in value:
                _plain(each, depth - 1)
    elif kind not in _PLAIN:
        raise Misfit("a plain value", value)
    return value
