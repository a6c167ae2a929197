"""The page of `--help`: flags in groups, the most needed first."""

import re
import shutil
import textwrap
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dataflow.flags.declared import Flag

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
