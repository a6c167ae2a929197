"""Text to a terminal, a pipe or a file, through nothing that somebody else could wait for."""

import io
import os
import select
import threading
from collections.abc import Callable
from typing import TextIO

END_S = 5.0
"""Seconds for a reader to take the last of what is shown."""


class Direct(io.TextIOBase):
    """Writes to a stream's descriptor. A write may take for ever, but it holds no lock meanwhile: a
    stream's own is taken by the interpreter at its end.
    """

    def __init__(self, stream: TextIO) -> None:
        """Errors: as the stream's `fileno`."""
        self._descriptor, self._encoding = stream.fileno(), stream.encoding
        if select.select([], [self._descriptor], [], 0)[1]:
            stream.flush()  # what was printed before

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's."""
        return self._encoding

    def fileno(self) -> int:
        """The stream's."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        """Write all of it."""
        remaining = memoryview(text.encode(self._encoding, "replace"))
        while remaining:
            try:
                remaining = remaining[os.write(self._descriptor, remaining) :]
            except BlockingIOError:  # a descriptor that somebody has set so
                select.select([], [self._descriptor], [], 1.0)
        return len(text)


def direct(stream: TextIO) -> TextIO:
    """The way around a stream of the interpreter's own; any other stream as it is."""
    if type(stream) is not io.TextIOWrapper:
        return stream
    try:
        return Direct(stream)  # type: ignore[return-value]
    except (OSError, ValueError):  # no descriptor behind it, or a closed one
        return stream


def for_a_while(act: Callable[[], object], end_s: float = END_S) -> None:
    """Do what may take for ever, and wait `end_s` for it at most; its errors are dropped."""

    def run() -> None:
        try:
            act()
        except Exception:
            return

    thread = threading.Thread(target=run, name="aside", daemon=True)
    thread.start()
    thread.join(end_s)
