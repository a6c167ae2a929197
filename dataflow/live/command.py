"""`dataflow live RUN`: serves the page until Ctrl-C, and lets everything else on the machine go
first.
"""

import asyncio
import collections
import contextlib
import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pyarrow as pa
from starlette.responses import FileResponse, Response

from dataflow.draw import theme
from dataflow.errors import GraphError, RunError
from dataflow.folder.arrow_reading import read_arrow
from dataflow.folder.live_changes import latest_swaps, of_operators, read_changes, read_swaps
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.trace import BESIDE_WORK, MINUTE, WORK, RecentSpan, files_of, last_spans
from dataflow.history.describe import described
from dataflow.history.rollout_view import vocabulary_of
from dataflow.live import rollouts
from dataflow.live.looks import LEISURE, Ask, Looks, Marks, newest_of
from dataflow.live.rollouts import RolloutFilter, Rollouts
from dataflow.live.series import SHOWN_POINTS, Metrics
from dataflow.live.server import PageServer, sentence
from dataflow.live.steering import Controls, Steering
from dataflow.runs import drawing
from dataflow.runs.pictures import knob_text
from dataflow.system.files import RunFolderError, to_json
from dataflow.system.priority import step_back
from dataflow.system.processes import user_here
from dataflow.worker.state_clock import STATES

# The last minute of a run as a Chrome trace, for ui.perfetto.dev: of one under way, over, or
# copied from elsewhere.

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
    LookupError where neither is there.
    """
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
        key = span.process, span.node, span.activity
        before, ended = last.get(key, (None, 0.0))
        if before is not None and span.activity in RESTS and span.begin_s - ended < JOINED_S:
            before["dur"] = _us(span.end_s - begin) - before["ts"]
            last[key] = before, span.end_s
            continue
        ts, ends = _us(span.begin_s - begin), _us(span.end_s - begin)
        event = {
            "name": span.node if span.activity == WORK else span.activity,
            "cat": "wait" if span.activity in RESTS else "work",
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
    return span.process, span.node, span.activity in RESTS


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
    recent = [event for event in spans if event["ts"] + event["dur"] > begin]
    return {"traceEvents": [*(event for event in events if event.get("ph") == "M"), *recent]}


# What stands at which address below the page's token.

# Which knobs of a run may change while it goes on, with the values that hold now.


def settable_now(folder: RunFolder) -> dict[str, list[dict[str, str]]]:
    """By node, its knobs: name, value as one types it, and from when on another one counts."""
    declared, swaps = described(folder)[1].get("settable"), latest_swaps(read_swaps(folder))
    knobs_by_node = dict(declared) if isinstance(declared, dict) else {}
    knobs_by_node |= {swap.node: dict(swap.knobs) for swap in swaps}
    changed = {
        (change.node, change.knob): change.value
        for change in of_operators(read_changes(folder), swaps)
    }
    shown: dict[str, list[dict[str, str]]] = {}
    for node, knobs in knobs_by_node.items():
        shown[node] = [
            {
                "name": knob,
                "value": _typed(changed.get((node, knob), knob_facts.get("value"))),
                "at": str(knob_facts.get("at", "")),
            }
            for knob, knob_facts in knobs.items()
        ]
    return shown


def _typed(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return to_json(value) if isinstance(value, list) else str(value)


KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
JSON = "application/json"
MOST_RUNS = 16
MOST_POINTS = 4_000
MOST_KEYS = 40
PATIENCE_S = 10.0
"""For another question about the same run."""
SHARED_S, MOST_SHARED_S, MOST_SHARED = 0.9, 10.0, 16
"""For so long all pages get one answer to the same question; a table of rollouts for as long as
looks leave a run be, but never longer than that; so many are kept."""
CHARTS = ("names", "series", "marks")
"""Questions to which all pages get one answer until there is something new to show."""
TRACE_NAME, MINUTE_NAME = "trace.json", "last-minute.json"


class WatchedRun:
    """What is known of one run folder, for all who ask; each question is bounded, and one is
    answered at a time.
    """

    def __init__(self, folder: RunFolder, ask: Ask) -> None:
        self.folder, self.lock = folder, threading.Lock()
        self.looks, self.metrics = Looks(folder, ask), Metrics(folder)
        self.marks, self.rollouts = Marks(folder), Rollouts(folder)
        self._graph: tuple[Any, dict[str, Any]] | None = None
        self._table: tuple[tuple[str, int], pa.Table] | None = None
        self._vocabulary: tuple[Mapping[int, str] | None] | None = None
        self._has_minute = False

    @property
    def graph(self) -> dict[str, Any]:
        """Nodes, edges, where they run, and the drawing."""
        file = self.folder.graph_svg
        stamp = (file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else None
        if self._graph is None or self._graph[0] != stamp:
            graph, config = described(self.folder)
            shape = drawing.read_picture(self.folder)
            if shape is not None:
                drawing.name_edges(shape, graph)
            self._graph = stamp, _plain_graph(graph, config) | {"picture": shape}
        return self._graph[1]

    @property
    def has_minute(self) -> bool:
        """Whether there is a trace of its last minute; once there is, there always is."""
        self._has_minute = self._has_minute or has_minute(self.folder)
        return self._has_minute

    def table(self, kind: str, node: str, step: int) -> pa.Table:
        """A file of rollouts; the last one is kept."""
        path = self.rollouts.file(kind, node, step)
        key = (str(path), path.stat().st_mtime_ns)
        if self._table is None or self._table[0] != key:
            self._table = key, read_arrow(path)
        return self._table[1]

    @property
    def vocabulary(self) -> Mapping[int, str] | None:
        """Texts of token ids, where a checkpoint has its tokenizer."""
        if self._vocabulary is None or self._vocabulary[0] is None:
            try:
                self._vocabulary = (vocabulary_of(self.folder),)
            except Exception:  # of the tokenizers package, which knows no narrower one
                self._vocabulary = ({},)
        return self._vocabulary[0] or None


class PageAnswers:
    """Of all runs of a page; called in threads."""

    def __init__(
        self, folders: Sequence[RunFolder], ask: Ask, steering: Steering | None = None
    ) -> None:
        """steering: how runs are changed; None: they are not."""
        self._runs = [WatchedRun(folder, ask) for folder in folders]
        self._steering = steering
        self._recent: collections.OrderedDict[str, tuple[float, int, Response]] = (
            collections.OrderedDict()
        )
        """Answers, until when they are given, and what charts showed."""
        self._questions: Mapping[str, Callable[[WatchedRun, PageQuery], Any]] = {
            "graph": lambda run, question: run.graph | {"settable": settable_now(run.folder)},
            "now": _now,
            "names": _names,
            "series": _series,
            "marks": lambda run, question: run.marks.look(run.metrics.restarts, run.metrics.rounds),
            "rollouts": _rollouts,
            "rollout": lambda run, question: rollouts.rollout_of(
                _table(run, question), question.whole("row")
            ),
            "text": lambda run, question: rollouts.text_of(
                _table(run, question),
                question.whole("row"),
                question.text("field"),
                question.whole("from", 0),
            ),
            "tokens": lambda run, question: rollouts.tokens_of(
                _table(run, question),
                question.whole("row"),
                question.whole("from", 0),
                question.text("colour"),
                run.vocabulary,
            ),
        }

    def __call__(self, address: str) -> Response:
        """What stands there. Errors: LookupError where nothing does, ValueError where the question
        is none.
        """
        path, _, query = address.partition("?")
        question = PageQuery(parse_qs(query, keep_blank_values=True, max_num_fields=100))
        if path == "api/runs":
            runs = [{"run": at, "name": run.folder.path.name} for at, run in enumerate(self._runs)]
            return _json({"runs": runs, "steers": self._steering is not None})
        if path == "trace":
            run = self._run(question)
            if question.text("part") == "minute":
                attached = {"Content-Disposition": f'attachment; filename="{MINUTE_NAME}"'}
                return Response(self._minute(run), headers=attached, media_type=JSON)
            if not run.folder.trace.is_file():
                raise LookupError("this run has no trace yet; it is written when the run ends")
            return FileResponse(run.folder.trace, media_type=JSON, filename=TRACE_NAME)
        name = path.removeprefix("api/")
        if path.startswith("api/") and (answer := self._questions.get(name)) is not None:
            run = self._run(question)
            if not run.lock.acquire(timeout=PATIENCE_S):
                return sentence(503, "the run's folder is slow to read; the page asks again")
            try:
                return self._shared(
                    address, run.metrics.shown(), name, lambda: _json(answer(run, question))
                )
            finally:
                run.lock.release()
        return _file(path or "index.html")

    def _minute(self, run: WatchedRun) -> str:
        with run.lock:
            run.marks.look((), ())
        return last_minute(run.folder, run.marks.within)

    def _shared(
        self, address: str, shown: int, name: str, make: Callable[[], Response]
    ) -> Response:
        """An answer that another page has had, or a new one. shown: of charts, now."""
        until, had, answer = self._recent.get(address, (-math.inf, 0, None))
        if answer is None or time.monotonic() > until or (name in CHARTS and had != shown):
            began = time.process_time()  # of all threads: files are read by several
            answer = make()
            took = time.process_time() - began
            reused_s = max(SHARED_S, LEISURE * took) if name == "rollouts" else SHARED_S
            until = time.monotonic() + (
                MOST_SHARED_S if name in CHARTS else min(MOST_SHARED_S, reused_s)
            )
            self._recent[address] = until, shown, answer
            self._recent.move_to_end(address)
            while len(self._recent) > MOST_SHARED:
                self._recent.popitem(last=False)
        return answer

    def steer(self, address: str, body: bytes) -> Response:
        """Ask a run for what a request names. Errors: as for what is read, and ValueError where it
        is no request.
        """
        assert self._steering is not None, "the server takes none else"
        run = self._run(PageQuery(parse_qs(address.partition("?")[2], max_num_fields=100)))
        return _json({"answer": self._steering(run.folder, body)})

    def _run(self, question: "PageQuery") -> WatchedRun:
        number = question.whole("run", 0)
        if not 0 <= number < len(self._runs):
            raise LookupError(
                f"this page shows {len(self._runs)} runs, and none with number {number}"
            )
        run = self._runs[number]
        if not run.folder.path.is_dir():
            raise RunFolderError(
                f"the folder of this run, '{run.folder.path.name}', is not there any more; it was"
                " moved or removed; put it back, or start dataflow live with its new place"
            )
        return run


class PageQuery:
    """The values after the question mark."""

    def __init__(self, values: Mapping[str, Sequence[str]]) -> None:
        self._values = values

    def text(self, name: str, default: str = "") -> str:
        """A value as it is."""
        return self._values.get(name, [default])[0]

    def texts(self, name: str) -> Sequence[str]:
        """All values of a name."""
        return self._values.get(name, ())

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number. Errors: ValueError."""
        text = self.text(name)
        if not text and default is not None:
            return default
        if not text.lstrip("-").isdecimal() or not text.isascii() or len(text) > 15:
            raise ValueError(f"'{name}' is to be a whole number")
        return int(text)

    def number(self, name: str, default: float) -> float:
        """A number. Errors: ValueError."""
        value = float(self.text(name) or default)
        return default if math.isnan(value) else value


def _now(run: WatchedRun, question: PageQuery) -> dict[str, Any]:
    read = run.metrics.look()
    newest = {node: newest_of(line) for node, line in run.metrics.newest.items()}
    return run.looks.look() | {
        "read": round(read, 3),
        "changes": run.metrics.shown(),
        "newest": newest,
        "has_trace": run.folder.trace.is_file(),
        "has_minute": run.has_minute,
    }


def _names(run: WatchedRun, question: PageQuery) -> dict[str, Any]:
    read = run.metrics.look()
    return {"series": run.metrics.names(), "left_out": run.metrics.left_out, "read": round(read, 3)}


def _series(run: WatchedRun, question: PageQuery) -> dict[str, Any]:
    run.metrics.look()
    most = min(MOST_POINTS, max(10, question.whole("points", SHOWN_POINTS)))
    begin, end = question.number("from", -math.inf), question.number("to", math.inf)
    points_by_key: dict[str, dict[str, Any] | None] = {}
    for key in question.texts("key")[:MOST_KEYS]:
        try:
            points_by_key[key] = run.metrics.points(key, most, begin, end)
        except LookupError:
            points_by_key[key] = None
    return {"series": points_by_key}


def _rollouts(run: WatchedRun, question: PageQuery) -> dict[str, Any]:
    upto = question.whole("upto", -1)
    row_filter = RolloutFilter(
        kind=question.text("kind", "step"),
        node=question.text("node"),
        upto=upto if upto >= 0 else None,
        search=question.text("search")[:200],
        sort=question.text("sort", "step")[:100],
        down=question.text("order", "down") != "up",
        page=max(0, question.whole("page", 0)),
    )
    return run.rollouts.table(row_filter) | {"nodes": run.rollouts.nodes()}


def _table(run: WatchedRun, question: PageQuery) -> pa.Table:
    return run.table(question.text("kind", "step"), question.text("node"), question.whole("step"))


def _plain_graph(graph: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    placed, hosts = config.get("placed") or {}, config.get("hosts") or {}
    return {
        "name": graph.get("name"),
        "nodes": [
            {
                "name": node.get("name"),
                "operator": node.get("operator"),
                "kind": node.get("kind"),
                "knobs": {
                    name: knob_text(value) for name, value in (node.get("knobs") or {}).items()
                },
                "placed": placed.get(node.get("name")) or {},
                "hosts": hosts.get(node.get("name")) or [],
            }
            for node in graph.get("nodes", [])
        ],
        "edges": [
            {key: edge.get(key) for key in ("from", "to", "plane", "source", "max_staleness")}
            for edge in graph.get("edges", [])
        ],
        "plan": [str(line) for line in config.get("plan") or []],
    }


def _file(name: str) -> Response:
    """A file of the page, of those that there are."""
    if name == "picture.css":
        return Response(theme.style(), media_type="text/css")
    for file in resources.files(__package__).joinpath("page").iterdir():
        if file.name == name:
            kind = KINDS.get(name[name.rfind(".") :])
            if kind is not None:
                return Response(file.read_bytes(), media_type=kind)
    raise LookupError("nothing stands at this address")


def _json(value: Any) -> Response:
    try:
        # long lists of numbers are looked through once
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError):
        text = to_json(value)
    return Response(text.encode("utf-8", "replace"), media_type=JSON)


TOKEN_BYTES = 24
STEERS = "which whoever has this address may stop and change"


def live(runs: Sequence[Path], ask: Ask, port: int = 0, controls: Controls | None = None) -> int:
    """Serve the page of these runs; returns when it is interrupted. controls: how they are changed;
    None: not at all.

    Errors: RunFolderError where there is no such folder, RunError where the port is taken.
    """
    if len(runs) > MOST_RUNS:
        raise GraphError(
            f"a page shows {MOST_RUNS} runs at most, but {len(runs)} were named; name fewer"
        )
    folders = [RunFolder.open(run) for run in runs]
    step_back()
    by = f"{user_here()}, from the live page"
    answers = PageAnswers(folders, ask, Steering(controls, by) if controls is not None else None)
    steer = answers.steer if controls is not None else None
    server = PageServer(answers, secrets.token_urlsafe(TOKEN_BYTES), steer=steer)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(server, port, folders, may="read-only" if controls is None else STEERS))
    return 0


async def _serve(
    server: PageServer, port: int, folders: Sequence[RunFolder], may: str = "read-only"
) -> None:
    try:
        await server.start(port)
    except OSError as error:
        raise RunError(
            f"port {port} of this machine cannot be had: {error.strerror}; name another with"
            " --port, or none"
        ) from error
    names = ", ".join(folder.path.name for folder in folders)
    print(f"{names}, {may}, for browsers on this machine until Ctrl-C:\n{server.url}", flush=True)
    await server.run()
