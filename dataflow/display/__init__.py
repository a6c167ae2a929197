"""What a user sees while a graph runs, and when it has ended."""

import os
from collections.abc import Callable
from typing import TextIO

from rich.console import Console

from dataflow.display.snapshot import EdgeSnapshot, NodeSnapshot, Snapshot, Summary
from dataflow.display.views import LiveView, PlainView, SafeView, View


def make_view(stream: TextIO, interval_s: float = 5.0) -> SafeView:
    """A live view where `stream` is a terminal, else a line every `interval_s` seconds; it never raises."""
    makers: list[Callable[[], View]] = [lambda: PlainView(stream, interval_s)]
    if _is_terminal(stream):
        makers.insert(0, lambda: LiveView(Console(file=stream)))
    return SafeView(makers)


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
    "View",
    "make_view",
]
