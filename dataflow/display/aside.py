"""A view in a thread of its own: a terminal that stops reading delays nobody."""

import contextlib
import queue
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TextIO

from dataflow.display.outlet import END_S
from dataflow.display.snapshot import Snapshot, Summary
from dataflow.display.views import View

MESSAGES_KEPT = 10_000
"""Unread messages that are held; the oldest are dropped."""


_LOOK_S = 10.0
"""Seconds after which it looks by itself for something to show."""


class SafeView:
    """A view that never raises into a run and never holds it up.

    consumes: snapshots, of which the newest counts; messages and the summary, in their order
    produces: what its view draws; where one view fails the next takes its place, at last none
    waits for: the terminal, in its thread; whoever closes it waits so long as was said, for the
        last to be drawn
    unblocked by: whoever reads the terminal
    """

    def __init__(self, makers: Iterable[Callable[[], View]], end_s: float = END_S) -> None:
        """makers: of the views, the best one first. end_s: for the last to be drawn."""
        self._makers, self._end_s = list(makers), end_s
        self._view: View | None = None
        self._snapshot: Snapshot | None = None
        self._acts: deque[Callable[[View], None]] = deque(maxlen=MESSAGES_KEPT)
        # a signal handler may put into it at any time
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Whether there is more to come."""
        self._thread: threading.Thread | None = None
        if self._makers:
            self._thread = threading.Thread(target=self._show, name="view", daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def update(self, snapshot: Snapshot) -> None:
        """Show the run as it is now."""
        self._snapshot = snapshot
        self._wake()

    def message(self, text: str) -> None:
        """Say something that stays on the screen."""
        self._later(lambda view: view.message(text))

    def summary(self, summary: Summary) -> None:
        """Say how the run ended."""
        self._later(lambda view: view.summary(summary))

    def close(self) -> None:
        """Give the terminal back, if it takes it in time; may be called twice."""
        if self._thread is not None:
            self._wakes.put(False)
            self._thread.join(self._end_s)

    def _later(self, act: Callable[[View], None]) -> None:
        if self._thread is not None:
            self._acts.append(act)
            self._wake()

    def _wake(self) -> None:
        if self._wakes.empty():
            self._wakes.put(True)

    def _show(self) -> None:
        """The thread."""
        # stty tostop: jobs in the background may not write
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        self._next()
        goes_on = True
        while goes_on:
            with contextlib.suppress(queue.Empty):
                goes_on = self._wakes.get(timeout=_LOOK_S)
            snapshot, self._snapshot = self._snapshot, None
            if snapshot is not None:
                self._act(lambda view: view.update(snapshot))  # noqa: B023
            while self._acts:
                self._act(self._acts.popleft())
        self._act(lambda view: view.close())

    def _act(self, act: Callable[[View], None]) -> None:
        while self._view is not None:
            try:
                act(self._view)
                return
            except Exception:
                # A display is no reason to end a run: fall back to a simpler one and try again.
                with contextlib.suppress(Exception):
                    self._view.close()
                self._next()

    def _next(self) -> None:
        self._view = None
        while self._makers and self._view is None:
            with contextlib.suppress(Exception):
                self._view = self._makers.pop(0)()


class _Lines:
    """Stands for a stream: each line is a message of a view, and nothing is waited for."""

    def __init__(self, view: SafeView, stream: TextIO) -> None:
        self._view, self._stream, self._begun = view, stream, ""

    def write(self, text: str) -> int:
        """Keep text until its line is whole."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            self._view.message(line)
        return len(text)

    def flush(self) -> None:
        """Pass on what is not yet a whole line."""
        if self._begun:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def told_by(view: SafeView, *names: str) -> Iterator[None]:
    """What this process prints meanwhile to `sys.stdout` or `sys.stderr`, as named, are messages of
    the view.
    """
    before = {name: getattr(sys, name) for name in names}
    for name, stream in before.items():
        setattr(sys, name, _Lines(view, stream))
    try:
        yield
    finally:
        for name, stream in before.items():
            getattr(sys, name).flush()
            setattr(sys, name, stream)
