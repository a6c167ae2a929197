"""What every node did when, as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dataflow.folder.recent import BESIDE_WORK, WORK, RecentSpans
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.spans import Spans
from dataflow.system.optional_files import read_text

MOST_SPANS = 50_000
LEAST_S = 0.001
"""Shorter rests of a node are told nobody."""


class Trace:
    """Spans of work of one process; the clock is the machine's monotonic one, so processes fit
    together.

    Neighbouring spans of a node are joined, the more of them there are, over the longer pauses.
    """

    def __init__(self, process: str) -> None:
        self._process = process
        self._spans = Spans(MOST_SPANS)
        self.recent = RecentSpans(process)
        """The last minute, with what nodes waited for and what their operators told by name."""

    def add(self, node: str, activity: str, begin_s: float, end_s: float) -> None:
        """What `node` did from begin to end, in seconds: `WORK`, or why it rested."""
        if activity == WORK:
            self._spans.add(node, begin_s, end_s)
        if activity == WORK or end_s - begin_s >= LEAST_S:
            self.recent.add(node, activity, begin_s, end_s)

    @contextlib.contextmanager
    def within(self, node: str, activity: str) -> Iterator[None]:
        """A stretch of a slice of work, by name."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.recent.add(node, activity, began, time.monotonic())

    def write(self, folder: RunFolder) -> None:
        """Put the spans beside the process's log, for `merge`."""
        self.recent.write(folder)
        path = folder.logs / f"{self._process}.trace"
        lines = (json.dumps([self._process, node, begin, end]) for node, begin, end in self._spans)
        folder.extras.write(path, "".join(f"{line}\n" for line in lines))


class NodeSpans:
    """Tells of the work of one node, and of its rests between."""

    def __init__(
        self, node: str, tell: Callable[[str, str, float, float], None], now: float
    ) -> None:
        self._node, self._tell = node, tell
        self._rests, self._rested = "waiting", now

    def turned(
        self, began: float, ended: float, state: str, *, is_work: bool, beside: float
    ) -> None:
        """A turn of its loop is over, which was work or a part of the rest. state: how it rests
        until the next. beside: the share of its own processes that are at work then.
        """
        rests = BESIDE_WORK if beside else state
        if is_work or rests != self._rests:
            self.rest(began if is_work else ended)
            self._rests = rests
        if is_work:
            self._tell(self._node, WORK, began, ended)
            self._rested = ended

    def rest(self, now: float) -> None:
        """Tell of the rest so far."""
        self._tell(self._node, self._rests, self._rested, now)
        self._rested = now


def merge(folder: RunFolder) -> None:
    """Make trace.json of what the processes left, and remove that. Lines that are torn are passed
    over.
    """
    torn = 0
    processes: dict[str, int] = {}
    events: list[Mapping[str, Any]] = []
    for path in sorted(folder.logs.glob("*.trace")):
        for line in read_text(path, folder.extras.tell).splitlines():
            try:
                process, node, begin, end = json.loads(line)
                begin, end = float(begin), float(end)
                pid = processes.setdefault(str(process), len(processes) + 1)
            except (ValueError, TypeError):
                torn += 1
                continue
            events.append(
                {
                    "name": node,
                    "ph": "X",
                    "pid": pid,
                    "tid": node,
                    "ts": begin * 1e6,
                    "dur": (end - begin) * 1e6,
                }
            )
        folder.extras.remove(path)
    if torn:
        folder.extras.tell(
            f"{torn} lines of traces in '{folder.logs}' are torn, and left out of"
            f" {folder.trace.name}"
        )
    start = min((event["ts"] for event in events), default=0.0)
    names = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}}
        for process, pid in processes.items()
    ]
    shifted = [
        {**event, "ts": round(event["ts"] - start, 1), "dur": round(event["dur"], 1)}
        for event in events
    ]
    folder.extras.write(folder.trace, json.dumps({"traceEvents": names + shifted}))
