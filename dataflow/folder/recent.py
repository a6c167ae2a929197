"""The last minute of each process, span by span, on disk while the run goes on: in two files, one
of which is whole.

A line holds what was new since the line before: {"process", "wall": seconds since 1970 less the
machine's monotonic clock, "spans": [[node, what, begin, end], ..]}, by that clock. Files of several
hosts thus fit together as well as their clocks do.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dataflow.folder.run_folder import RunFolder
from dataflow.folder.spans import Spans

WORK = "at work"
"""One slice of a node's loop, apart from the spans that the operator names (`Context.span`)."""
BESIDE_WORK = "its processes at work"
"""A stretch in which an operator's own processes work, and its loop does not."""
MINUTE = 60.0
"""Seconds that a file covers before the other one is begun anew; both hold the last minute, and
another at most."""
WRITE_S = 2.0
"""Seconds between two lines."""
MOST_SPANS = 2_000
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
        self._spans = Spans(MOST_SPANS)
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
        self._next, self._spans = now + WRITE_S, Spans(MOST_SPANS)
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
