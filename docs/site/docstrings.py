"""Docstrings as the site's pages show them: examples as code, knobs with their defaults; for
griffe.
"""

import re
from collections.abc import Iterator
from typing import Any

import griffe

from dataflow import settable

EXAMPLE = re.compile(r"(?m)^ *>>> .*(?:\n(?! *$).+)*")
"""From a prompt to the next empty line."""
KNOBS = re.compile(r"\n*Its knobs: `[\w.]+`\.\n*")
"""Where a reader of the source finds what the page has anyhow."""


class Docstrings(griffe.Extension):
    """What the pages show instead of what stands in the source."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Fence the examples of a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = as_page(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Show defaults of knobs, and which may change in a live run, once `dataclasses` has made
        the signatures.
        """
        for owner in _classes(pkg):
            for attr in owner.attributes.values():
                at = _arguments(attr.value, "settable").get("at")
                if at is not None and attr.docstring is not None:
                    when = getattr(settable, str(at))
                    attr.docstring.value += f"\n\nIn a live run `dataflow set` changes it, {when}."
                attr.value = _default(attr.value)
            made = owner.members.get("__init__")
            for parameter in made.parameters if isinstance(made, griffe.Function) else ():
                parameter.default = _default(parameter.default)


def _classes(owner: griffe.Object) -> Iterator[griffe.Class]:
    for member in owner.members.values():
        if isinstance(member, griffe.Class):
            yield member
        if isinstance(member, griffe.Module | griffe.Class):
            yield from _classes(member)


def _default(value: Any) -> Any:
    """What stands for a value in the source, or what is declared with it as the default."""
    if found := _arguments(value, "settable"):
        return found["default"]
    found = _arguments(value, "field")
    return found.get("default") if found else value


def _arguments(value: Any, function: str) -> dict[str, Any]:
    """Of a call of that function, by name; empty for what is none. A class may have a method of its
    name, too.
    """
    if (
        not isinstance(value, griffe.ExprCall)
        or value.canonical_path.rpartition(".")[2] != function
    ):
        return {}
    named = {
        each.name: each.value for each in value.arguments if isinstance(each, griffe.ExprKeyword)
    }
    plain = [each for each in value.arguments if not isinstance(each, griffe.ExprKeyword)]
    return {**named, **({"default": plain[0]} if plain else {})}


def as_page(text: str) -> str:
    """A docstring with its examples as fenced code, and without the line that says where its knobs
    stand.
    """
    text = KNOBS.sub("\n\n", text)
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
