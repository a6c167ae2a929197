"""The flags that a function's parameters make: a dataclass among them makes one of each field."""

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dataflow.errors import GraphError

FIRST = "what everyone needs"
ALGORITHM = "this algorithm"
"""The heading of parameters beside those of a dataclass."""
HEADING = "heading"
"""ClassVar of a dataclass: above its flags in --help, where it is another than `FIRST`."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag: `--max-tokens 24`."""

    name: str
    """The name of the parameter or field: max_tokens."""
    kind: Any = str
    default: Any = inspect.Parameter.empty
    """`inspect.Parameter.empty`: it has to be given."""
    help: str = ""
    heading: str = FIRST
    repeats: bool = False
    """Whether it may be given several times, for a value each."""

    @property
    def option(self) -> str:
        """The flag on a command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_needed(self) -> bool:
        """Whether it has no default."""
        return self.default is inspect.Parameter.empty

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Its kind, or those of a union, without None."""
        is_union = typing.get_origin(self.kind) in (typing.Union, types.UnionType)
        return tuple(
            kind
            for kind in (typing.get_args(self.kind) if is_union else (self.kind,))
            if kind is not type(None)
        )

    @property
    def may_be_none(self) -> bool:
        """Whether None is a value of it."""
        return type(None) in typing.get_args(self.kind)

    @property
    def is_switch(self) -> bool:
        """Whether it is given without a value: `--chat`, `--no-chat`."""
        return self.kinds == (bool,)

    @property
    def takes_many(self) -> bool:
        """Whether several words are its value."""
        return any(
            typing.get_origin(kind) in (tuple, list, set, frozenset, dict) for kind in self.kinds
        )

    @property
    def choices(self) -> tuple[str, ...]:
        """All possible values; empty: any value of its kind."""
        choices = [typing.get_args(kind) for kind in self.kinds]
        return (
            tuple(map(str, choices[0]))
            if len(choices) == 1 and typing.get_origin(self.kinds[0]) is Literal
            else ()
        )


@dataclass(frozen=True)
class Declared:
    """The flags of a function's parameters."""

    build: Callable[..., Any]
    flags: Mapping[str, Flag]

    @classmethod
    def of(cls, build: Callable[..., Any]) -> "Declared":
        """Errors: GraphError for a parameter that cannot become a flag, or two of one name."""
        flags: dict[str, Flag] = {}
        parameters = _parameters(build)
        documented = parameter_docs(inspect.getdoc(build) or "")
        has_parts = any(_is_part(kind) for kind, _ in parameters.values())
        for name, (kind, default) in parameters.items():
            own = Flag(
                name=name,
                kind=kind,
                default=default,
                help=documented.get(name, ""),
                heading=ALGORITHM if has_parts else FIRST,
            )
            for flag in _fields(kind, default) if _is_part(kind) else [own]:
                if flag.name in flags:
                    raise GraphError(
                        f"'{build.__name__}' has two parameters '{flag.name}', of which one is a"
                        f" field of '{name}'; rename one of them"
                    )
                flags[flag.name] = flag
        return cls(build, flags)

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of the function, of a value for each flag. Errors: what its dataclasses
        raise.
        """
        return {
            name: _made(kind, values) if _is_part(kind) else values[name]
            for name, (kind, _) in _parameters(self.build).items()
        }


def _parameters(build: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Kind and default by name."""
    hints = typing.get_type_hints(build)
    parameters = {}
    for name, parameter in inspect.signature(build).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise GraphError(
                f"'{build.__name__}' takes *{name}, which cannot become a flag; name each parameter"
            )
        parameters[name] = (hints.get(name, str), parameter.default)
    return parameters


def _is_part(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _fields(kind: type, default: Any) -> list[Flag]:
    """A flag of each field, those of dataclasses within among them."""
    hints, docs, flags = typing.get_type_hints(kind), field_docs(kind), []
    for field in (candidate for candidate in dataclasses.fields(kind) if candidate.init):
        own = field.default
        if own is dataclasses.MISSING:
            factory = field.default_factory
            own = inspect.Parameter.empty if factory is dataclasses.MISSING else factory()
        if default is not inspect.Parameter.empty:
            own = getattr(default, field.name)
        if _is_part(hints[field.name]):
            flags += _fields(hints[field.name], own)
        else:
            flags.append(
                Flag(
                    name=field.name,
                    kind=hints[field.name],
                    default=own,
                    help=docs.get(field.name, ""),
                    heading=_heading(kind, field.name),
                )
            )
    order = [vars(owner).get(HEADING, FIRST) for owner in kind.__mro__]
    return sorted(
        flags, key=lambda flag: order.index(flag.heading) if flag.heading in order else len(order)
    )


def _made(kind: type, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    return kind(
        **{
            field.name: (
                _made(hints[field.name], values)
                if _is_part(hints[field.name])
                else values[field.name]
            )
            for field in dataclasses.fields(kind)
            if field.init
        }
    )


def _heading(kind: type, field: str) -> str:
    """The heading of the first class that has the field."""
    owner = next(
        owner_class
        for owner_class in reversed(kind.__mro__)
        if field in vars(owner_class).get("__annotations__", {})
    )
    return str(vars(owner).get(HEADING, FIRST))


@functools.cache
def field_docs(kind: type) -> Mapping[str, str]:
    """What stands under each field of a dataclass, those that it inherits among them; empty where
    there is no source.

    >>> from dataflow.limits import Limits
    >>> "hang_s" in field_docs(Limits)
    True
    """
    docs: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
        lines = getattr(body, "body", [])
        for line, after in itertools.pairwise(lines):
            match line, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str() as text)),
                ):
                    docs[name] = " ".join(text.split())
    return docs


def parameter_docs(docstring: str) -> dict[str, str]:
    """What a docstring's `Args:` says of each parameter.

    >>> parameter_docs('''Train.
    ...
    ... Args:
    ...     kl: what a nat costs,
    ...         in the loss.
    ... ''')
    {'kl': 'what a nat costs, in the loss.'}
    """
    _, _, section = inspect.cleandoc(docstring).partition("\nArgs:\n")
    docs: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        if begun := re.match(r" {4}(\w+): (.*)", line):
            name = begun[1]
            docs[name] = begun[2].strip()
        elif name and line.strip():
            docs[name] += " " + line.strip()
    return docs
