"""Flags as words, `--lr 1e-6 --chat`: which flags they are, and their values."""

import contextlib
import difflib
import inspect
import io
import re
import shutil
import textwrap
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from dataflow.errors import GraphError, called_here, hint
from dataflow.flags.declared import Flag

_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)(=?)(.*)", re.DOTALL)
_SWITCH = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    bool: "true or false",
}
_NONE = ("None", "none", "null")
_VALUE = "value"


class FlagError(GraphError):
    """A flag, or a file of flags, that cannot be read; a program ends with status 2."""


@dataclass
class Words:
    """The words of one flag."""

    flag: Flag
    words: list[str] = field(default_factory=list)
    off: bool = False
    """Whether it was --no-...."""
    place: str = ""
    """The place, as text, where that is no command line."""

    @property
    def name(self) -> str:
        """For people: as it was given."""
        return f"{self.place}: {self.flag.name}" if self.place else self.flag.option

    def value(self) -> Any:
        """Of the flag's kind. Errors: FlagError, which says what it takes."""
        flag, words = self.flag, self.words
        if flag.is_switch:
            return self._switched()
        if flag.repeats:
            return tuple(_read(typing.get_args(flag.kind)[0], [word], self) for word in words)
        if not words:
            if flag.takes_many and self.place:
                return _read(flag.kind, [], self)
            raise FlagError(f"{self.name} has no value, but takes {expected(flag)}")
        if flag.may_be_none and len(words) == 1 and words[0] in _NONE:
            return None
        return _read(flag.kind, words, self)

    def _switched(self) -> bool | None:
        if not self.words:
            return not self.off
        (word,) = self.words
        if self.flag.may_be_none and word in _NONE:
            return None
        if self.off or word.lower() not in _SWITCH:
            raise FlagError(f"{self.name} is {word!r}, but takes true or false")
        return _SWITCH[word.lower()]

    def as_arguments(self) -> list[str]:
        """The same on a command line."""
        option = self.flag.option
        if self.flag.is_switch:
            value = self.value()
            return [
                f"{option}=none" if value is None else option if value else f"--no-{option[2:]}"
            ]
        if self.flag.repeats:
            return [f"{option}={word}" for word in self.words]
        return [f"{option}={self.words[0]}"] if len(self.words) == 1 else [option, *self.words]


_NO_FLAG = Words(Flag(name="", kind=tuple[str, ...]))
"""Takes the words behind an unknown flag."""


def split(words: Sequence[str], flags: Mapping[str, Flag], program: str) -> dict[str, Words]:
    """Which flags stand there; what is given twice counts as it was given last. program: for
    people.

    Errors: FlagError for flags that the program does not have, each with what it is called here.
    """
    by_flag: dict[str, Words] = {}
    last: Words | None = None
    wrong: list[str] = []
    for word in words:
        if (match := _FLAG.fullmatch(word)) is None:
            last = _taken(word, last, flags, program)
            continue
        name, equals, value = match.groups()
        own = name.replace("-", "_")
        is_off = (
            own not in flags
            and own.startswith("no_")
            and own[3:] in flags
            and flags[own[3:]].is_switch
        )
        own = own[3:] if is_off else own
        if own not in flags or not word.startswith("--"):
            wrong.append(unknown(name, flags, program, word.partition("=")[0]))
            last = None if equals else _NO_FLAG
            continue
        last = (
            by_flag[own] if flags[own].repeats and own in by_flag else Words(flags[own], off=is_off)
        )
        by_flag[own] = last
        if equals:
            last.words.append(value)
            last = None if not (flags[own].takes_many and not flags[own].repeats) else last
    if wrong:
        raise FlagError("\n".join(wrong))
    return by_flag


def _taken(word: str, last: Words | None, flags: Mapping[str, Flag], program: str) -> Words | None:
    """A word that names no flag, as a value of the last one; gives who takes the next such word."""
    if last is not None and last.flag.is_switch and word.lower() in _SWITCH and not last.words:
        last.words.append(word)
        return None
    if last is not None and not last.flag.is_switch:
        last.words.append(word)
        return last if last.flag.takes_many and not last.flag.repeats else None
    key, equals, _ = word.partition("=")
    if equals and re.fullmatch(r"\+*[A-Za-z][\w.]*", key):  # as Hydra and OmegaConf have them
        raise FlagError(unknown(key.lstrip("+"), flags, program, key))
    raise FlagError(f"{program} was given {word!r}, which belongs to no flag; see {program} --help")


def unknown(name: str, flags: Collection[str], program: str, shown: str) -> str:
    """The refusal of an unknown name. shown: as it was written."""
    parts = name.replace("-", "_").split(".")
    for own in ("_".join(parts[-2:]), parts[-1]):
        if own in flags:
            return f"{program} has no {shown}; did you mean {_option(own)}?"
        if called := called_here(own, flags):
            return f"{program} has no {shown}; it is called {_option(called)} here"
    suggestion = hint(parts[-1], flags)
    if meant := re.search(r"did you mean '(\w+)'", suggestion):
        return f"{program} has no {shown}; did you mean {_option(meant[1])}?"
    if suggestion.startswith("; that is"):
        return f"{program} has no {shown}{suggestion}, in the file of a graph"
    return f"{program} has no {shown}; see its --help"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def expected(flag: Flag) -> str:
    """What a flag accepts, in words."""
    return " or ".join([*map(_named, flag.kinds), *(["None"] if flag.may_be_none else [])])


def _named(kind: Any) -> str:
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"one of {', '.join(filter(None, map(str, inside)))}"
    if origin is tuple and inside and Ellipsis not in inside:
        return " and ".join(map(_named, inside))
    if origin in (tuple, list, set, frozenset):
        return f"one or several of: {_named(inside[0])}" if inside else "several values"
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _read(kind: Any, words: Sequence[str], given: Words) -> Any:
    """A value of one kind: what tyro makes of the words."""

    def take(**values: Any) -> Any:
        return values[_VALUE]

    make: Callable[..., Any] = take
    make.__annotations__ = {_VALUE: kind}
    parameter = inspect.Parameter(_VALUE, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
    make.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    option = f"--{_VALUE}"
    arguments = [f"{option}={words[0]}"] if len(words) == 1 else [option, *words]
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it draws a box of its own
            return tyro.cli(make, args=arguments, console_outputs=False)
    except SystemExit:
        shown = " ".join(words)
        near = difflib.get_close_matches(shown, given.flag.choices, n=1)
        raise FlagError(
            f"{given.name} is {shown!r:.60}, but takes {expected(given.flag)}"
            f"{f'; did you mean {near[0]}?' if near else ''}"
        ) from None
    except tyro.constructors.UnsupportedTypeAnnotationError as error:
        raise FlagError(f"'{given.flag.name}' is a {kind}, which no flag can be: {error}") from None


def values_of(
    words: Mapping[str, Words], flags: Mapping[str, Flag], called: str, program: str
) -> dict[str, Any]:
    """A value for each flag. called, program: for people, and on a command line. Errors:
    FlagError.
    """
    if missing := [flag for flag in flags.values() if flag.is_needed and flag.name not in words]:
        missing_flags = " and ".join(flag.option for flag in missing)
        example = " ".join(f"{flag.option} {takes(flag)}" for flag in missing)
        raise FlagError(
            f"{called} needs {missing_flags}; write {program} {example}, or see its --help"
        )
    return {
        name: words[name].value() if name in words else flag.default for name, flag in flags.items()
    }


# The page of `--help`: flags in groups, the most needed first.


_LEFT = 28
"""Columns of the flag and its value."""
_MOST, _LEAST = 120, 50
"""Columns of a page."""
_TAKES = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


def page(program: str, about: str, flags: Iterable[Flag], columns: int | None = None) -> str:
    """The whole text. about: what the program does. columns: of the page; None: the terminal's."""
    width = min(_MOST, max(_LEAST, columns or shutil.get_terminal_size().columns))
    flags = tuple(flags)
    needed = " ".join(f"{flag.option} {takes(flag)}" for flag in flags if flag.is_needed)
    usage = f"usage: {program} {needed + ' ' if needed else ''}[FLAGS]"
    lines = textwrap.wrap(usage, width, subsequent_indent=" " * 7, break_on_hyphens=False)
    lines += [
        "",
        *(line for part in about.split("\n\n") for line in (*textwrap.wrap(part, width), "")),
    ]
    heading = ""
    for flag in flags:
        if flag.heading != heading:
            lines += [""] * bool(heading) + [flag.heading]
            heading = flag.heading
        lines += _entry(flag, width)
    return "\n".join(lines)


def takes(flag: Flag) -> str:
    """The value's form, behind the flag."""
    if flag.repeats:
        return _takes(typing.get_args(flag.kind)[0])
    return (
        ""
        if flag.is_switch
        else "|".join(filter(None, flag.choices))
        or "|".join(dict.fromkeys(map(_takes, flag.kinds)))
    )


def _takes(kind: Any) -> str:
    inside = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(map(str, inside))
    if inside:
        shown = [_takes(inner) for inner in inside if inner is not Ellipsis]
        return f"{shown[0]} ..." if Ellipsis in inside or len(shown) == 1 else " ".join(shown)
    return _TAKES.get(kind, getattr(kind, "__name__", "VALUE").upper())


def _entry(flag: Flag, width: int) -> list[str]:
    option = f"--no-{flag.option[2:]}" if flag.is_switch and flag.default is True else flag.option
    head = f"  {option} {takes(flag)}".rstrip()
    right = " ".join(filter(None, (_sentence(flag.help), _default(flag))))
    lines = textwrap.wrap(right, width - _LEFT, break_on_hyphens=False, break_long_words=False) or [
        ""
    ]
    if len(head) >= _LEFT:
        return [head, *(" " * _LEFT + line for line in lines)]
    return [f"{head:<{_LEFT}}{lines[0]}".rstrip(), *(" " * _LEFT + line for line in lines[1:])]


def _sentence(text: str) -> str:
    """A help text in the page's style: a small first letter, except in names, and no full stop."""
    text = " ".join(text.split()).removesuffix(".")
    return text[:1].lower() + text[1:] if re.match(r"[A-Z][a-z]*[ ,;:-](?![A-Z])", text) else text


def _default(flag: Flag) -> str:
    if flag.is_needed:
        return "(needed)"
    if flag.default is None or flag.default in ("", ()) or flag.is_switch:
        return ""
    words = flag.default if isinstance(flag.default, tuple | list) else [flag.default]
    return f"[{' '.join(f'{word:g}' if isinstance(word, float) else str(word) for word in words)}]"
