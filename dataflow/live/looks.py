"""How a run stands now: what its scheduler says, or what its folder says of one that is over; in
plain values.
"""

import bisect
import collections
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataflow.display import EdgeSnapshot
from dataflow.display.formatting import duration
from dataflow.doctor.facts import Facts, Node, WorkerFacts, gather
from dataflow.doctor.verdict import bottleneck, trouble, verdict
from dataflow.errors import DeadlineError, RunError
from dataflow.folder.faults import FILE, describe_faults
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.live_changes import read_live_changes
from dataflow.folder.request_log import read_requests
from dataflow.folder.run_folder import RunFolder
from dataflow.history.bottleneck import bounded
from dataflow.history.describe import described
from dataflow.history.resume import TIMES
from dataflow.system import processes
from dataflow.system.files import stream_lines
from dataflow.worker.kept_counts import ENDS, Crossed, EdgeSums, known_edges, total
from dataflow.worker.state_clock import BESIDE, STATES

# How a run's edges stand, in plain values: what crosses data edges, and what exchanges on weight
# edges took.


_STALENESS = tuple(
    f"{part}_{kind}"
    for part in ("staleness", "staleness_generating", "staleness_waiting")
    for kind in ("mean", "max")
)


def counted(state: Mapping[str, Any]) -> EdgeSums | None:
    """What has crossed each data edge, as the workers of a run under way say; None where they count
    nothing.
    """
    heartbeats = [worker["heartbeat"] for worker in state.get("workers", {}).values()]
    counts = [heartbeat["crossed"] for heartbeat in heartbeats if "crossed" in heartbeat]
    return total(counts) if counts else None


def data_edges(
    edges: Iterable[EdgeSnapshot], now: EdgeSums | None, before: EdgeSums | None, passed: float
) -> list[dict[str, Any]]:
    """Each with its depth and credit, rows and bytes that have crossed it, and how many in each of
    the seconds passed, as counted where it ends. before: how things stood when those began; None:
    not known.
    """
    return [
        {
            "from": edge.producer,
            "to": edge.consumer,
            "source": edge.source,
            "depth": edge.depth,
            "capacity": edge.capacity,
            **_crossed(edge.name, now, before, passed),
        }
        for edge in edges
    ]


def _crossed(
    name: str, now: EdgeSums | None, before: EdgeSums | None, passed: float
) -> dict[str, Any]:
    if now is None:
        return {"rows_s": None, "bytes_s": None, "crossed": None}
    none = {end: Crossed() for end in ENDS}
    ends = {end: list(counts) for end, counts in now.get(name, none).items()}
    grown = None
    if before is not None and passed > 0:
        was = before.get(name, none)["received"]
        grown = Crossed(
            *(after - earlier for after, earlier in zip(ends["received"], was, strict=True))
        )
    if grown is None or min(grown) < 0:
        return {"rows_s": None, "bytes_s": None, "crossed": ends}
    return {
        "rows_s": round(grown.rows / passed, 3),
        "bytes_s": round(grown.bytes / passed, 1),
        "crossed": ends,
    }


def data_edges_of(graph: Mapping[str, Any]) -> list[EdgeSnapshot]:
    """Those of a graph that nobody runs now."""
    return [
        EdgeSnapshot(
            producer=str(edge["from"]), consumer=str(edge["to"]), source=str(edge.get("source"))
        )
        for edge in graph.get("edges", [])
        if edge.get("plane") == "data"
    ]


def exchanges(line: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of a trainer's line of metrics, by reader, all its replicas together: the oldest version that
    one of them took last, and of what that cost them the most: seconds as the trainer and as the
    reader sees them, bytes, and what these would have been without deltas and quantization.
    """
    by_reader: dict[str, dict[str, Any]] = {}
    for name, exchange in _exchanges_of(line):
        version = exchange.get("version")
        version = max(0, version) if isinstance(version, int) else 0
        summary = by_reader.setdefault(
            name.rpartition("-")[0] or name, {"readers": 0, "version": version}
        )
        summary["readers"] += 1
        summary["version"] = min(summary["version"], version)
        for key in ("seconds", "committed_seconds", "taken_seconds", "nbytes", "full_bytes"):
            if isinstance(exchange.get(key), int | float):
                summary[key] = max(summary.get(key, 0), exchange[key])
    return by_reader


def _exchanges_of(line: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each reader of which the line tells."""
    sent = line.get("weights_sent")
    for name, exchange in sent.items() if isinstance(sent, dict) else ():
        if isinstance(exchange, dict):
            yield name, exchange


def newest_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows at the weight edges of a trainer, of its newest line."""
    figures = {key: line.get(key) for key in ("step", *_STALENESS, "seconds_publish")}
    return figures | {"exchanges": exchanges(line)}


# One sentence on a run that is over, from what its nodes did in all of it; pure.


def sentence_of_the_end(
    outcome: str, passed_s: float, nodes: Sequence[Mapping[str, Any]], bound: str | None
) -> str:
    """How it ended, and which node bounded it, so that the others waited for it.

    nodes: each with its name and shares, as the page has them.
    """
    ended = {
        "finished": "The run has finished",
        "stopped": "The run was stopped",
        "failed": "The run has failed",
    }.get(outcome, "The run did not come to its end")
    if not passed_s:
        return f"{ended}."
    sentence = f"{ended} after {duration(passed_s)} of training"
    busy = {node["name"]: float(node["shares"]["busy"]) for node in nodes if node.get("shares")}
    return (
        f"{sentence}; '{bound}' bounded it, at work {busy[bound]:.0%} of the time."
        if bound in busy
        else f"{sentence}."
    )


Ask = Callable[[RunFolder, float], Mapping[str, Any]]
"""Asks the scheduler of a run, for so many seconds; as
`dataflow.scheduler.requests.ask_for_state`."""
ANSWER_S = 1.0
LEAST_S, LEISURE = 0.9, 50.0
"""Between two looks; and at least so many times the processor time of the last one, so that they
take a fiftieth of it at most."""
STILL_S = 2.0
"""For so long nothing has moved before the ledger is asked what is waited for: of a run that moves
nothing is said of it."""
BELOW_S = 5.0
"""For so long it is known which processes workers have started: it takes a look at all that there
are."""
WINDOW_S = 3.0
"""Rates and shares are those of so many last seconds."""
SUMS = (*STATES, BESIDE, "measured", "rows_in", "rows_out", "tokens")
"""What is told of a node since it began, in seconds and counts."""


class Looks:
    """Looks at one run, for all who ask at once.

    consumes: answers of the scheduler; times.json and activity.jsonl of a run that is over
    produces: how each node and edge stands
    waits for: the scheduler, a second at most
    unblocked by: its answer, or that deadline
    """

    def __init__(
        self, folder: RunFolder, ask: Ask, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._ask, self._clock = folder, ask, clock
        self._next = float("-inf")
        self._shown: dict[str, Any] = {}
        self._past: collections.deque[tuple[float, Mapping[str, Any], EdgeSums | None]] = (
            collections.deque()
        )
        self._below: tuple[float, Mapping[int, list[int]]] = float("-inf"), {}

    def look(self) -> dict[str, Any]:
        """The run as it is now, or was a moment ago."""
        if self._clock() >= self._next:
            began = time.thread_time()
            try:
                self._shown = self._live(self._ask(self._folder, ANSWER_S))
            except DeadlineError as error:
                self._shown = {**self._from_files(), "state": "silent", "sentence": str(error)}
            except RunError as error:
                self._shown = self._from_files() | (
                    {"why": str(error)} if "scheduler" in str(error) else {}
                )
            took = time.thread_time() - began
            self._next = self._clock() + (
                LEAST_S if len(self._past) == 1 else max(LEAST_S, LEISURE * took)
            )
        return self._shown

    def _live(self, state: Mapping[str, Any]) -> dict[str, Any]:
        facts = gather(
            self._folder, state, during_s=0.0, wake=False, still_s=STILL_S, below=self._below_each
        )
        self._past.append((self._clock(), _sums(state), counted(state)))
        while len(self._past) > 2 and self._past[-1][0] - self._past[1][0] >= WINDOW_S:
            self._past.popleft()
        (then, before, crossed_before), (now, sums, crossed) = self._past[0], self._past[-1]
        spent = (
            {node: _less(sums[node], before[node]) for node in sums if node in before}
            if now > then
            else {}
        )
        passed = now - then
        nodes = [_node(node, spent.get(node.name), passed) for node in facts.nodes.values()]
        return {
            "state": "under way",
            "phase": facts.phase.replace("_", " "),
            "draining": facts.draining,
            "sentence": verdict(facts),
            "bottleneck": bottleneck(facts),
            "step": facts.step,
            "steps": facts.steps,
            "still_s": round(facts.still_s, 1),
            "over_s": round(passed, 1),
            "nodes": nodes,
            "weights": _weights(facts),
            "edges": data_edges(facts.edges, crossed, crossed_before, passed),
        }

    def _below_each(self, pids: Iterable[int]) -> Mapping[int, list[int]]:
        """As `processes.below_each`, or as it was a moment ago of the same ones."""
        parents = set(pids)
        at, below = self._below
        if self._clock() >= at + BELOW_S or below.keys() != parents:
            below = processes.below_each(parents)
            self._below = self._clock(), below
        return below

    def _from_files(self) -> dict[str, Any]:
        """Of a run that nobody leads: over, killed, or copied from elsewhere."""
        self._past.clear()
        times = self._folder.read_json("times.json", TIMES)
        outcome = str(times.get("outcome", "")) or "not finished"
        seconds = times.get("seconds")
        graph, config = described(self._folder)
        done, passed = whole(line for _, line in self._folder.stream_activity(0))
        nodes = [
            _ended(str(node.get("name")), done.get(str(node.get("name")), {}), passed)
            for node in graph.get("nodes", [])
        ]
        crossed = known_edges(times["edges"]) if "edges" in times else None
        versions = {node["name"]: node["version"] for node in nodes}
        weight_edges = [
            (str(e["from"]), str(e["to"]))
            for e in graph.get("edges", [])
            if e.get("plane") == "weights"
        ]
        bound = _bounded(nodes, config)
        return {
            "state": outcome,
            "bottleneck": bound,
            "phase": "",
            "draining": False,
            "step": None,
            "steps": None,
            "still_s": None,
            "sentence": sentence_of_the_end(outcome, float(seconds or passed), nodes, bound),
            "over_s": passed,
            "seconds": seconds if isinstance(seconds, int | float) else None,
            "nodes": nodes,
            "weights": [_versions(*ends, versions) for ends in weight_edges],
            "edges": data_edges(data_edges_of(graph), crossed, {}, float(seconds or 0.0)),
        }


def _bounded(nodes: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> str | None:
    """The node that bounded a run, by the shares of all of it."""
    busy = {str(node["name"]): float(node["shares"]["busy"]) for node in nodes if node["shares"]}
    bottleneck = bounded(
        1.0, busy, {str(node["name"]): float(node["beside"]) for node in nodes}, config
    )
    return bottleneck.node if bottleneck else None


def whole(lines: Iterable[Mapping[str, Any]]) -> tuple[dict[str, dict[str, Any]], float]:
    """Of lines of activity.jsonl: by node what it did in all parts of a run, and in how many
    seconds.

    A node's seconds count from its start in that part, those of the run from the first step of that
    part.
    """
    sums: dict[str, dict[str, Any]] = {}
    passed = 0.0
    for part in _parts(lines):
        first: dict[str, dict[str, Any]] = {}
        for _, nodes in part:
            first = {**nodes, **first}
        seconds, last = part[-1]
        passed += seconds
        for name, figures in last.items():
            grown, before = _grown(figures, first[name]), sums.get(name, {})
            sums[name] = {
                **figures,
                **{key: value + before.get(key, 0.0) for key, value in grown.items()},
            }
    return sums, passed


def _parts(
    lines: Iterable[Mapping[str, Any]],
) -> list[list[tuple[float, dict[str, dict[str, Any]]]]]:
    """Its lines by the part of the run that wrote them, from before its first step on: seconds, and
    what nodes say.
    """
    parts: list[list[tuple[float, dict[str, dict[str, Any]]]]] = []
    for line in lines:
        seconds, nodes = line.get("seconds"), line.get("nodes")
        if not isinstance(seconds, int | float) or not isinstance(nodes, dict):
            continue
        figures_by_node = {
            name: figures for name, figures in nodes.items() if isinstance(figures, dict)
        }
        if not parts or seconds < parts[-1][-1][0]:
            parts.append([])
        if not seconds:
            parts[-1].clear()
        parts[-1].append((float(seconds), figures_by_node))
    return parts


def _grown(figures: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float]:
    keys = [key for key in SUMS if isinstance(figures.get(key), int | float)]
    return {key: max(0.0, figures[key] - float(before.get(key) or 0.0)) for key in keys}


def shares(spent: Mapping[str, float] | None) -> dict[str, float] | None:
    """Of each state the share of the time that was measured; nothing fills what none of them
    covers.
    """
    whole = 0.0 if spent is None else spent.get("measured", 0.0)
    if spent is None or whole <= 0:
        return None
    return {state: round(min(1.0, max(0.0, spent.get(state, 0.0)) / whole), 4) for state in STATES}


def _beside(spent: Mapping[str, float] | None) -> float:
    """The share of its time in which a node's own processes were at work and its loop was not."""
    whole = 0.0 if spent is None else spent.get("measured", 0.0)
    return 0.0 if spent is None or whole <= 0 else max(0.0, spent.get(BESIDE, 0.0)) / whole


def _sums(run_state: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """By node, all its replicas together: seconds of each kind, rows, tokens, since they began."""
    sums: dict[str, dict[str, float]] = {}
    for worker in run_state.get("workers", {}).values():
        for name, stats in worker["heartbeat"].get("nodes", {}).items():
            node_sums = sums.setdefault(name, dict.fromkeys(SUMS, 0.0))
            for state, value in stats["seconds"].items():
                node_sums[state] += float(value)
            node_sums["measured"] += float(stats["measured_s"])
            for key in ("rows_in", "rows_out"):
                node_sums[key] += float(stats[key])
            node_sums["tokens"] += float(stats["status"].get("tokens", 0))
    return sums


def _less(sums: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float] | None:
    """What came on top; None where a worker was started anew, and counts from nothing."""
    less = {key: sums[key] - before[key] for key in sums}
    return less if min(less.values()) >= 0 else None


def _node(node: Node, spent: Mapping[str, float] | None, passed: float) -> dict[str, Any]:
    present = [w for w in node.workers if w.state in ("ready", "stopping")]
    ill = [f"{worker.name} {problem}" for worker in node.workers if (problem := trouble(worker))]
    return {
        "name": node.name,
        "state": node.state,
        "for_s": round(node.for_s, 1),
        "shares": shares(spent),
        "beside": _beside(spent),
        **_per_second(spent, passed),
        "pending": node.pending,
        "held_back": node.held_back,
        "step": node.step,
        "version": node.version,
        "rows_in": node.rows_in,
        "rows_out": node.rows_out,
        "replicas": len(present),
        "ill": ill,
        "workers": [
            _worker(worker) for worker in node.workers if worker.state not in ("left", "gone")
        ],
    }


def _worker(worker: WorkerFacts) -> dict[str, Any]:
    processes = [worker.process, *worker.ranks] if worker.process else []
    alive = [process for process in processes if process is not None and process.state]
    return {
        "name": worker.name,
        "state": worker.state,
        "host": worker.host,
        "restarts": worker.restarts,
        "pid": worker.process.pid if worker.process else None,
        "processes_below": len(worker.ranks),
        "rss_bytes": sum(process.rss_bytes for process in alive) if alive else None,
    }


def _ended(name: str, figures: Mapping[str, Any], passed: float | None) -> dict[str, Any]:
    """A node of a run that is over, on the mean over all of it."""
    sums = {key: float(value) for key, value in figures.items() if isinstance(value, int | float)}
    measured = sums if figures and passed else None
    return {
        "name": name,
        "state": "over",
        "for_s": None,
        "shares": shares(measured),
        "beside": _beside(measured),
        **_per_second(measured, passed or 0.0),
        "pending": None,
        "held_back": None,
        "step": figures.get("step"),
        "version": figures.get("version"),
        "rows_in": figures.get("rows_in"),
        "rows_out": figures.get("rows_out"),
        "replicas": figures.get("replicas"),
        "ill": [],
        "workers": [],
    }


def _per_second(spent: Mapping[str, float] | None, passed: float) -> dict[str, float | None]:
    rates: dict[str, float | None] = {}
    for key in ("rows_in", "rows_out", "tokens"):
        is_known = spent is not None and passed > 0 and (key != "tokens" or bool(spent.get(key)))
        rates[f"{key}_s"] = (
            round(spent.get(key, 0.0) / passed, 3) if is_known and spent is not None else None
        )
    return rates


def _weights(facts: Facts) -> list[dict[str, Any]]:
    versions = {name: node.version for name, node in facts.nodes.items()}
    return [_versions(feedback.trainer, feedback.reader, versions) for feedback in facts.feedbacks]


def _versions(trainer: str, reader: str, versions: Mapping[str, Any]) -> dict[str, Any]:
    newest, has = versions.get(trainer), versions.get(reader)
    behind = None if newest is None or has is None else max(0, newest - has)
    return {"from": trainer, "to": reader, "made": newest, "has": has, "behind": behind}


# What happened to a run at which step: faults, swaps and sets, requests, returns to a checkpoint,
# rounds.


MOST = 500
"""Of each kind that are told, the last ones."""
MOST_BYTES = 4 << 20
"""Of faults.jsonl, its end."""
MOST_STEPS = 200_000
"""Whose times are kept."""
LOOK_S = 2.0
"""Between two looks, at least."""


@dataclass
class Marks:
    """Of one run; looked for every two seconds at most."""

    folder: RunFolder
    _times: list[tuple[float, int]] = field(default_factory=list)
    _next: float = float("-inf")
    _lines: dict[str, Any] = field(default_factory=dict)

    def look(self, restarts: Sequence[int], rounds: Sequence[int]) -> dict[str, Any]:
        """All marks, each with its step."""
        if time.monotonic() >= self._next:
            began = time.thread_time()
            self._look_at_times()
            path = self.folder.path / FILE
            start = max(0, path.stat().st_size - MOST_BYTES) if path.is_file() else 0
            lines = [line for _, line in stream_lines(path, start)][-MOST:]
            self._lines = {
                "faults": [
                    {"step": self._step_at(line.get("at")), **_fault(line)} for line in lines
                ],
                "swaps": [
                    {"step": change.step, "text": str(change)}
                    for change in read_live_changes(self.folder)[-MOST:]
                ],
                "requests": [_request(line) for line in read_requests(self.folder.path)[-MOST:]],
            }
            self._next = time.monotonic() + max(LOOK_S, LEISURE * (time.thread_time() - began))
        return {**self._lines, "restarts": list(restarts)[-MOST:], "rounds": list(rounds)[-MOST:]}

    def within(self, begin: float, end: float) -> list[tuple[float, str]]:
        """What was marked between two times, in seconds since 1970, and the steps made then; as of
        the last look.
        """
        first, last = (bisect.bisect_left(self._times, (at, 0)) for at in (begin, end))
        steps = [(at, f"step {step}") for at, step in self._times[first:last]]
        marks = [(mark["at"], mark["text"]) for mark in self._lines.get("faults", ())]
        marks += [(mark["at"], mark["request"]) for mark in self._lines.get("requests", ())]
        return sorted(
            steps + [(at, text) for at, text in marks if at is not None and begin <= at < end]
        )

    def _look_at_times(self) -> None:
        """When steps were made: those that are new, of the trainer that leads."""
        _, config = described(self.folder)
        leading = config.get("leading") or []
        if not leading:
            return
        with (
            contextlib.suppress(LedgerError),
            Ledger.open(self.folder.ledger, readonly=True) as ledger,
        ):
            if ledger.last_step(leading[0]) < (self._times[-1][1] if self._times else 0):
                self._times.clear()  # it went back to a checkpoint
            newest_step = self._times[-1][1] if self._times else 0
            self._times += [
                (at, step) for step, at in ledger.step_times(str(leading[0]), newest_step)
            ]
            del self._times[:-MOST_STEPS]

    def _step_at(self, at: Any) -> int | None:
        """The last step before a time; None where nothing is known of it."""
        if not self._times or not isinstance(at, int | float):
            return None
        place = bisect.bisect_right(self._times, (float(at), 1 << 62))
        return self._times[place - 1][1] if place else 0


def _request(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of requests.jsonl."""
    at, step = line.get("at"), line.get("step")
    return {
        "at": at if isinstance(at, int | float) else None,
        "step": step if isinstance(step, int) else None,
        **{key: str(line.get(key, "")) for key in ("by", "request", "answer")},
        "refused": line.get("refused") is True,
    }


def _fault(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of faults.jsonl: when, and in a sentence."""
    try:
        (text,) = describe_faults([line])
    except (TypeError, ValueError):
        text = "a line of faults.jsonl that is none"
    at, back = line.get("at"), line.get("recovered_s")
    return {
        "at": at if isinstance(at, int | float) else None,
        "worker": str(line.get("worker", "")),
        "text": text,
        "recovered": back is not None,
    }
