"""What a user sees while a graph runs, and at its end."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console

from dataflow.display.screen import EdgeSnapshot, NodeSnapshot, Snapshot, Summary
from dataflow.display.views import (
    LiveView,
    PassedOn,
    PlainView,
    SafeView,
    direct,
    for_a_while,
    told_by,
)


def make_view(stream: TextIO, interval_s: float = 5.0) -> SafeView:
    """A live view where `stream` is a terminal, else a line every `interval_s` seconds; it never
    raises, and whoever tells it something never waits for the stream.
    """
    way = direct(stream)
    makers: list[Callable[[], PlainView | LiveView]] = [lambda: PlainView(way, interval_s)]
    if _is_terminal(stream):
        makers.insert(0, lambda: LiveView(Console(file=way)))
    return SafeView(makers)


@contextlib.contextmanager
def showing(stream: TextIO, *, quiet: bool) -> Iterator[SafeView]:
    """A view of a run; where it is to be quiet, of its messages alone, on sys.stderr. What else
    this process prints does not wait for a terminal either: it stands above the live view, or comes
    to sys.stderr by a way of its own.
    """
    with contextlib.ExitStack() as stack:
        view = None if quiet else stack.enter_context(make_view(stream))
        if view is not None and _is_terminal(stream):
            stack.enter_context(told_by(view, "stdout", "stderr"))
        else:
            way = direct(sys.stderr)
            aside = stack.enter_context(SafeView([lambda: PassedOn(way)]))
            stack.enter_context(told_by(aside, "stderr"))
            view = view or aside
        yield view


def say(text: str, stream: TextIO) -> None:
    """Print lines of rich's markup, whether or not anybody reads them."""
    for_a_while(lambda: Console(file=direct(stream)).print(text, soft_wrap=True))


def _is_terminal(stream: TextIO) -> bool:
    if os.environ.get("CI") or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # no stream at all, or a closed one
        return False


__all__ = [
    "EdgeSnapshot",
    "LiveView",
    "NodeSnapshot",
    "PlainView",
    "SafeView",
    "Snapshot",
    "Summary",
    "for_a_while",
    "make_view",
    "say",
    "showing",
]
