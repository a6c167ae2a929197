"""Docstrings as the site's pages show them: examples as code, knobs with their defaults; for griffe."""

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

    def on_attribute(self, *, attr: griffe.Attribute, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Show the default of a knob that may change in a live run, and say that it may."""
        call = attr.value
        if not isinstance(call, griffe.ExprCall) or call.canonical_path != "dataflow.settable.settable":
            return
        default, *others = call.arguments
        at = next(str(each.value) for each in others if isinstance(each, griffe.ExprKeyword))
        attr.value = default
        if attr.docstring is not None:
            attr.docstring.value += f"\n\nIn a live run `dataflow set` changes it, {getattr(settable, at)}."

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Show the default of what dataclasses.field declares, once signatures are made."""
        for attr in _attributes(pkg):
            call = attr.value
            if isinstance(call, griffe.ExprCall) and call.canonical_path == "dataclasses.field":
                named = [each for each in call.arguments if isinstance(each, griffe.ExprKeyword)]
                attr.value = next((each.value for each in named if each.name == "default"), None)


def _attributes(owner: griffe.Object) -> Iterator[griffe.Attribute]:
    for member in owner.members.values():
        if isinstance(member, griffe.Attribute):
            yield member
        elif isinstance(member, griffe.Module | griffe.Class):
            yield from _attributes(member)


def as_page(text: str) -> str:
    """A docstring with its examples as fenced code, and without the line that says where its knobs stand."""
    text = KNOBS.sub("\n\n", text)
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
