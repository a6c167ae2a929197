"""What every node did when, as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""

import contextlib
import itertools
import json
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.folder.run_folder import RunFolder
from dataflow.system.files import read_text

WORK = "at work"
"""One slice of a node's loop, apart from the spans that the operator names (`Context.span`)."""
BESIDE_WORK = "its processes at work"
"""A stretch in which an operator's own processes work, and its loop does not."""
MINUTE = 60.0
"""Seconds that a file covers before the other one is begun anew; both hold the last minute, and
another at most."""
WRITE_S = 2.0
"""Seconds between two lines."""
LINE_SPANS = 2_000
"""The most spans of a line; where there are more, neighbours are joined over longer pauses."""
MOST_BYTES = 64 << 20
"""The most bytes of all files that are read at a time, from the end of each."""
_NAMES = "{}.recent-{}.jsonl"


class RecentSpans:
    """What the nodes of one process did of late.

    consumes: spans, as they end
    produces: a line every two seconds
    waits for: the disk, which may refuse it
    unblocked by: -
    """

    def __init__(
        self,
        process: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._process, self._clock, self._wall = process, clock, wall
        self._spans = Spans(LINE_SPANS)
        self._next = clock() + WRITE_S
        self._path: Path | None = None
        self._begun = 0.0

    def add(self, node: str, activity: str, begin_s: float, end_s: float) -> None:
        """Add a span that begins after all of its name have ended."""
        self._spans.add(f"{node}\0{activity}", begin_s, end_s)

    @property
    def is_due(self) -> bool:
        """Whether it is time for a line."""
        return self._clock() >= self._next

    def write(self, folder: RunFolder) -> None:
        """Write new spans."""
        now, spans = self._clock(), self._spans
        self._next, self._spans = now + WRITE_S, Spans(LINE_SPANS)
        if not len(spans):
            return
        plain = [[*name.split("\0"), round(begin, 6), round(end, 6)] for name, begin, end in spans]
        line = json.dumps(
            {"process": self._process, "wall": round(self._wall() - now, 6), "spans": plain}
        )
        if self._path is not None and now - self._begun < MINUTE:
            folder.extras.append(self._path, line)
            return
        self._path, self._begun = self._other(folder), now
        folder.extras.write(self._path, f"{line}\n")

    def _other(self, folder: RunFolder) -> Path:
        """The file that is not being written; for a new process, the older one."""
        paths = [folder.logs / _NAMES.format(self._process, number) for number in range(2)]
        if self._path is not None:
            return paths[paths.index(self._path) - 1]
        return min(paths, key=lambda path: path.stat().st_mtime_ns if path.exists() else 0)


@dataclass(frozen=True)
class RecentSpan:
    """One span of one node, in seconds since 1970."""

    process: str
    node: str
    activity: str
    begin_s: float
    end_s: float


def files_of(folder: RunFolder) -> Iterator[Path]:
    """The files of all processes, also of hosts whose logs were fetched."""
    return itertools.chain(
        folder.logs.glob(_NAMES.format("*", "[01]")), folder.logs.glob(_NAMES.format("*/*", "[01]"))
    )


def last_spans(folder: RunFolder, seconds: float) -> list[RecentSpan]:
    """What was done in the last so many seconds before the newest span of all, in order; clipped to
    them.

    Lines that are torn are passed over.
    """
    paths = sorted(files_of(folder))
    newest = [span for path in paths for span in _spans(path, MOST_BYTES // len(paths))]
    begin = max((span.end_s for span in newest), default=0.0) - seconds
    clipped = [
        RecentSpan(span.process, span.node, span.activity, max(begin, span.begin_s), span.end_s)
        for span in newest
        if span.end_s > begin
    ]
    return sorted(clipped, key=lambda span: (span.begin_s, -span.end_s))


def _spans(path: Path, most_bytes: int) -> Iterator[RecentSpan]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most_bytes))
            lines = file.read(most_bytes).splitlines()
    except OSError:  # it was begun anew meanwhile
        return
    for text in lines:
        try:
            line = json.loads(text)
            process, wall = str(line["process"]), float(line["wall"])
            read = [
                RecentSpan(
                    process, str(node), str(activity), wall + float(begin), wall + float(end)
                )
                for node, activity, begin, end in line["spans"]
            ]
        except (ValueError, TypeError, KeyError):
            continue
        yield from read


FIRST_JOIN_S = 0.0005


class Spans:
    """When each node was at work: the more there was, the coarser, and always from the first span
    to the last.
    """

    def __init__(self, most: int) -> None:
        """most: spans that are held."""
        self._most = most
        self._join_s = FIRST_JOIN_S
        """Spans of a node with a shorter pause between them become one."""
        self._names: dict[str, int] = {}
        self._last: dict[int, int] = {}
        """Index of a node's newest span."""
        self._nodes, self._begins, self._ends = array("H"), array("d"), array("d")

    def __len__(self) -> int:
        return len(self._begins)

    def __iter__(self) -> Iterator[tuple[str, float, float]]:
        names = list(self._names)
        return ((names[node], begin, end) for node, begin, end in zip(*self._columns, strict=True))

    def add(self, node: str, begin_s: float, end_s: float) -> None:
        """Add a span that begins after all others of its node have ended."""
        number = self._names.setdefault(node, len(self._names))
        last = self._last.get(number)
        self._put(
            number, begin_s, end_s, last is not None and begin_s - self._ends[last] < self._join_s
        )
        if len(self) > self._most:
            self._halve()

    def _halve(self) -> None:
        """Join the spans with the shorter half of the pauses, and such ones from now on; of equal
        ones every other.
        """
        last: dict[int, tuple[int, float]] = {}
        pauses = []
        for place, (node, begin_s, end_s) in enumerate(zip(*self._columns, strict=True)):
            ordinal, before_s = last.get(node, (0, begin_s))
            if ordinal:
                pauses.append((begin_s - before_s, ordinal % 2 == 0, place))
            last[node] = ordinal + 1, end_s
        joined = sorted(pauses)[: (len(pauses) + 1) // 2]
        self._join_s = max([self._join_s, *(pause_s for pause_s, _, _ in joined)])
        places, old = {place for _, _, place in joined}, self._columns
        self._last, self._nodes, self._begins, self._ends = {}, array("H"), array("d"), array("d")
        for place, span in enumerate(zip(*old, strict=True)):
            self._put(*span, place in places)

    @property
    def _columns(self) -> tuple["array[int]", "array[float]", "array[float]"]:
        return self._nodes, self._begins, self._ends

    def _put(self, node: int, begin_s: float, end_s: float, is_joined: bool) -> None:
        if is_joined:
            self._ends[self._last[node]] = end_s
            return
        self._last[node] = len(self)
        self._nodes.append(node)
        self._begins.append(begin_s)
        self._ends.append(end_s)


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
