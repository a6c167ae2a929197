"""The last minute of a run as a Chrome trace, for ui.perfetto.dev: of one under way, over, or
copied from elsewhere."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dataflow.folder.recent import BESIDE_WORK, MINUTE, WORK, RecentSpan, files_of, last_spans
from dataflow.folder.run_folder import RunFolder
from dataflow.worker.state_clock import STATES

MOST_BYTES = 64 << 20
"""Of a trace.json of which the end is taken."""
JOINED_S = 1e-5
"""A stretch that goes on over several lines of a file is one."""
RESTS = frozenset({*STATES, BESIDE_WORK})
"""What stands in a row of its own below a node's work, which it does not lie within."""

Marked = Callable[[float, float], Sequence[tuple[float, str]]]
"""What was marked between two times, in seconds since 1970."""


def has_minute(folder: RunFolder) -> bool:
    """Whether the run has left one."""
    return next(files_of(folder), None) is not None or folder.trace.is_file()


def last_minute(folder: RunFolder, marked: Marked = lambda begin, end: ()) -> str:
    """The trace, as JSON: of each process and node its work, what that was in detail, and why it
    rested; marks.

    Of a run that has kept no spans of its last minute, the end of its trace.json. Errors:
    LookupError where neither is there."""
    spans = last_spans(folder, MINUTE)
    if spans:
        return json.dumps(_trace(spans, marked), separators=(",", ":"))
    if not folder.trace.is_file() or folder.trace.stat().st_size > MOST_BYTES:
        raise LookupError("this run has left no trace of its last minute")
    return json.dumps(_end_of(json.loads(folder.trace.read_bytes())), separators=(",", ":"))


def _trace(spans: Sequence[RecentSpan], marked: Marked) -> dict[str, Any]:
    begin, end = spans[0].begin_s, max(span.end_s for span in spans)
    pids = {name: number for number, name in enumerate(sorted({span.process for span in spans}), 1)}
    rows = {row: number for number, row in enumerate(sorted({_row(span) for span in spans}), 1)}
    names = [_named("process_name", pid, 0, name) for name, pid in pids.items()]
    for (process, node, rests), tid in rows.items():
        names += [
            _named("thread_name", pids[process], tid, f"{node}, waits" if rests else node),
            {
                "name": "thread_sort_index",
                "ph": "M",
                "pid": pids[process],
                "tid": tid,
                "args": {"sort_index": tid},
            },
        ]
    events: list[dict[str, Any]] = []
    last: dict[tuple[str, str, str], tuple[dict[str, Any], float]] = {}
    for span in spans:
        key = span.process, span.node, span.what
        before, ended = last.get(key, (None, 0.0))
        if before is not None and span.what in RESTS and span.begin_s - ended < JOINED_S:
            before["dur"] = _us(span.end_s - begin) - before["ts"]
            last[key] = before, span.end_s
            continue
        ts, ends = _us(span.begin_s - begin), _us(span.end_s - begin)
        event = {
            "name": span.node if span.what == WORK else span.what,
            "cat": "wait" if span.what in RESTS else "work",
            "ph": "X",
            "pid": pids[span.process],
            "tid": rows[_row(span)],
            "ts": ts,
            "dur": ends - ts,
        }
        events.append(event)
        last[key] = event, span.end_s
    marks = [
        {"name": text, "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": _us(at - begin)}
        for at, text in marked(begin, end)
    ]
    return {
        "traceEvents": [*names, _named("process_name", 0, 0, "the run"), *events, *marks],
        "displayTimeUnit": "ms",
    }


def _row(span: RecentSpan) -> tuple[str, str, bool]:
    return span.process, span.node, span.what in RESTS


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> int:
    """Whole microseconds, so that what lies within another still does once both are rounded."""
    return round(seconds * 1e6)


def _end_of(trace: Mapping[str, Any]) -> dict[str, Any]:
    """The last minute of a whole run's trace."""
    events = [event for event in trace.get("traceEvents", []) if isinstance(event, dict)]
    spans = [event for event in events if event.get("ph") == "X"]
    begin = max((event["ts"] + event["dur"] for event in spans), default=0.0) - MINUTE * 1e6
    kept = [event for event in spans if event["ts"] + event["dur"] > begin]
    return {"traceEvents": [*(event for event in events if event.get("ph") == "M"), *kept]}
