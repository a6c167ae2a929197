"""The doctor's facts of a run at one moment, as plain values."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dataflow.display.screen import EdgeSnapshot
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import described
from dataflow.structure import edge_name
from dataflow.system import processes, stacks
from dataflow.system.processes import Process
from dataflow.system.stacks import Thread
from dataflow.worker.state_clock import BESIDE, STATES

AWAY = ("forked", "starting", "dying", "down")
"""The scheduler's names for states of a worker that has not come yet, or has gone."""
SILENT_S = 2.0
"""A worker beats five times a second; one without a message for so long does not answer."""


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """A process of the run."""

    name: str
    nodes: tuple[str, ...] = ()
    state: str = "ready"
    """forked | starting | ready | dying | down | stopping | left | gone, as the scheduler says."""
    host: str = ""
    """Where it runs; empty: this machine, where there is no other."""
    cause: str = ""
    """Why it is dying, or was started again."""
    silent_s: float = 0.0
    """Seconds since its last message."""
    at: str = ""
    """The node whose slice of work it is in; empty: it rests."""
    at_s: float = 0.0
    """Seconds that it has been in that slice."""
    restarts: int = 0
    process: Process | None = None
    """None: it has no process, or one on another machine."""
    ranks: tuple[Process, ...] = ()
    """Processes that it has started: other ranks, scorers."""
    threads: tuple[Thread, ...] = ()
    dump: str = ""
    """Its stacks from its log, where it did not answer."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """An operator of the graph, its replicas taken together."""

    name: str
    kind: str = "operator"
    """source | operator | sink."""
    state: str = "waiting"
    """working | blocked | waiting | starved | paused | done."""
    for_s: float = 0.0
    """Seconds in that state, and without a moment of work unless the state is `working`."""
    busy: float | None = None
    """Share of the last seconds; likewise the other states."""
    blocked: float | None = None
    waiting: float | None = None
    starved: float | None = None
    beside: float | None = None
    """The part of busy that its own processes have, while its worker may be at another node."""
    pending: int = 0
    """Rows it holds and has not answered for."""
    held_back: int = 0
    """Prompts or groups that cannot begin before newer weights come."""
    step: int | None = None
    version: int | None = None
    """Version of its weights, or of those that it has made."""
    rows_in: int = 0
    rows_out: int = 0
    workers: tuple[WorkerFacts, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FeedbackFacts:
    """Weights that go from a trainer to a reader."""

    trainer: str
    reader: str
    every: int = 1
    """Versions between two that the reader takes."""


@dataclass(frozen=True, kw_only=True)
class Awaited:
    """The group that a trainer needs next, and where the ledger says it is."""

    group_id: int
    source: str
    state: str
    """issued | generating | generated | scored."""
    node: str = ""
    """The node that has it, where one says so; and the worker."""
    worker: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A run at one moment."""

    phase: str = "training"
    """starting | first_evaluation | training | last_evaluation | over."""
    draining: bool = False
    step: int = 0
    steps: int | None = None
    still_s: float = 0.0
    """Seconds since anything moved: rows, tokens, steps, versions."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    edges: tuple[EdgeSnapshot, ...] = ()
    feedbacks: tuple[FeedbackFacts, ...] = ()
    awaited: Mapping[str, Awaited] = field(default_factory=dict)
    """By trainer."""
    on_demand: tuple[str, ...] = ()
    """Sources that issue only for evaluations."""
    leading: tuple[str, ...] = ()
    """Trainers whose steps are the run's."""
    turns: tuple[tuple[str, ...], ...] = ()
    """Nodes that take turns on devices."""

    @property
    def workers(self) -> dict[str, WorkerFacts]:
        """All workers, by name."""
        return {worker.name: worker for node in self.nodes.values() for worker in node.workers}

    @property
    def evaluating(self) -> bool:
        """Whether training waits for an evaluation."""
        return self.phase in ("first_evaluation", "last_evaluation")


# Gathers facts from what a scheduler says of its run, from its folder and from the operating
# system.

_LIVE = ("R", "S", "D")
_ORDER = ("working", "blocked", "paused", "starved", "waiting", "done")
"""A node shows that state of its replicas which comes first here."""


Below = Callable[[Iterable[int]], Mapping[int, list[int]]]
"""Of each process those below it, as `processes.below_each`."""


def gather(
    folder: RunFolder,
    answer: Mapping[str, Any],
    *,
    during_s: float = 0.5,
    wake: bool = True,
    still_s: float = 0.0,
    below: Below = processes.below_each,
) -> Facts:
    """Facts of a run under way. during_s: for figures of CPU. wake: let silent workers dump their
    stacks. still_s: for so long nothing has moved before the ledger is asked what trainers wait
    for.
    """
    graph, config = described(folder)
    workers = _workers(folder, answer, during_s, wake, below)
    stands = float(answer.get("still_s", 0.0)) >= still_s
    data = [edge for edge in graph.get("edges", []) if edge.get("plane") == "data"]
    nodes = {
        node["name"]: _node(node, answer, [w for w in workers if node["name"] in w.nodes])
        for node in graph.get("nodes", [])
    }
    return Facts(
        phase=str(answer.get("phase", "")),
        draining=bool(answer.get("draining")),
        step=int(answer.get("step", 0)),
        steps=answer.get("steps"),
        still_s=float(answer.get("still_s", 0.0)),
        nodes=nodes,
        edges=_edges(data, answer),
        feedbacks=tuple(
            FeedbackFacts(
                trainer=edge["from"],
                reader=edge["to"],
                every=edge.get("refresh", {}).get("every", 1),
            )
            for edge in graph.get("edges", [])
            if edge.get("plane") == "weights"
        ),
        awaited=_awaited(folder, data, config, answer) if stands else {},
        on_demand=tuple(config.get("on_demand", ())),
        leading=tuple(config.get("leading", ())),
        turns=tuple(map(tuple, config.get("turns", ()))),
    )


def _workers(
    folder: RunFolder, answer: Mapping[str, Any], during_s: float, wake: bool, below_each: Below
) -> list[WorkerFacts]:
    workers: Mapping[str, Mapping[str, Any]] = answer.get("workers", {})
    machine = processes.machine()
    pids = {
        name: int(worker["pid"])
        for name, worker in workers.items()
        if worker["pid"] and worker.get("machine", machine) == machine
    }
    children = below_each(pids.values())
    below = {name: children[pid] for name, pid in pids.items()}
    looks = processes.look(
        [*pids.values(), *(pid for ranks in below.values() for pid in ranks)], during_s
    )
    ours = set(processes.below(int(answer["pid"]))) if wake and answer.get("pid") else set()
    facts = []
    for name, worker in workers.items():
        heartbeat, pid, silent_s = worker["heartbeat"], pids.get(name), float(worker["silent_s"])
        process = looks[pid] if pid else None
        dump, threads = "", worker.get("threads") if silent_s < SILENT_S else None
        if (
            wake
            and process
            and silent_s > SILENT_S
            and process.state in _LIVE
            and process.pid in ours
        ):
            dump = processes.dump(process.pid, folder.logs / f"{name}.log")
        facts.append(
            WorkerFacts(
                name=name,
                nodes=tuple(worker["nodes"]),
                state=worker["state"],
                host=worker.get("host", ""),
                cause=worker.get("cause", ""),
                silent_s=silent_s,
                at=heartbeat.get("at", "") if worker["state"] in ("starting", "ready") else "",
                at_s=float(heartbeat.get("at_s", 0.0)),
                restarts=int(worker.get("restarts", 0)),
                process=process,
                ranks=tuple(looks[rank] for rank in below.get(name, ())),
                threads=stacks.read(threads or []),
                dump=dump,
            )
        )
    return facts


def _node(
    declared: Mapping[str, Any], answer: Mapping[str, Any], workers: list[WorkerFacts]
) -> Node:
    name, kind = str(declared["name"]), str(declared["kind"])
    reports, pasts = [], []
    for worker in workers:
        report = answer["workers"][worker.name]["heartbeat"].get("nodes", {}).get(name)
        if report is not None and worker.state not in ("left", "gone"):
            reports.append(report)
            pasts.append(answer.get("history", {}).get(worker.name, {}).get(name, {}))
    statuses = [report["status"] for report in reports]
    states = [past.get("state", "waiting") for past in pasts]
    state = min(states, key=_ORDER.index, default="waiting")
    held_back = 0 if any(status.get("active") for status in statuses) else _sum(statuses, "waiting")
    return Node(
        name=name,
        kind=kind,
        state=state,
        for_s=min(
            (float(p.get("for_s", 0.0)) for p in pasts if p.get("state", "waiting") == state),
            default=0.0,
        ),
        **{state: _mean(pasts, state) for state in (*STATES, BESIDE)},
        pending=sum(
            int(report.get("pending", report["status"].get("queue", 0))) for report in reports
        ),
        held_back=held_back,
        step=_least(statuses, "step"),
        version=_least(statuses, "version"),
        rows_in=_sum(reports, "rows_in"),
        rows_out=_sum(reports, "rows_out"),
        workers=tuple(workers),
    )


def _edges(
    data: Iterable[Mapping[str, Any]], answer: Mapping[str, Any]
) -> tuple[EdgeSnapshot, ...]:
    """Each with the depth of its fullest receiver."""
    depths: dict[str, tuple[int, int]] = {}
    for worker in answer.get("workers", {}).values():
        for name, (depth, capacity) in worker["heartbeat"].get("edges", {}).items():
            depths[name] = max(depths.get(name, (0, capacity)), (depth, capacity))
    facts = []
    for edge in data:
        depth, capacity = depths.get(
            edge_name(edge["from"], edge["to"], edge["source"]), (None, None)
        )
        facts.append(
            EdgeSnapshot(
                producer=edge["from"],
                consumer=edge["to"],
                source=edge["source"],
                depth=depth,
                capacity=capacity,
            )
        )
    return tuple(facts)


def _awaited(
    folder: RunFolder,
    data: Iterable[Mapping[str, Any]],
    config: Mapping[str, Any],
    answer: Mapping[str, Any],
) -> dict[str, Awaited]:
    """For each trainer the next group in order that has not reached it."""
    sources = {
        edge["to"]: edge["source"] for edge in data if edge["to"] in config.get("max_staleness", {})
    }
    awaited: dict[str, Awaited] = {}
    with contextlib.suppress(LedgerError), Ledger.open(folder.ledger, readonly=True) as ledger:
        for trainer, source in sources.items():
            waiting = {group.group_id: group.state for group in ledger.in_flight(source, trainer)}
            group_id = _next(trainer, answer)
            if group_id is None or group_id not in waiting:
                on_the_way = [number for number, state in waiting.items() if state != "scored"]
                group_id = min(on_the_way or waiting, default=None)
            if group_id is not None:
                node, worker = _holder(trainer, source, group_id, answer)
                awaited[trainer] = Awaited(
                    group_id=group_id,
                    source=source,
                    state=waiting[group_id],
                    node=node,
                    worker=worker,
                )
    return awaited


def _next(trainer: str, answer: Mapping[str, Any]) -> int | None:
    """The group that a trainer says it needs next."""
    for worker in answer.get("workers", {}).values():
        group = worker["heartbeat"].get("nodes", {}).get(trainer, {}).get("status", {}).get("next")
        if group is not None:
            return int(group)
    return None


def _holder(trainer: str, source: str, group: int, answer: Mapping[str, Any]) -> tuple[str, str]:
    """The node and the worker whose oldest group of a source this is, the last of them on its
    way.
    """
    holders = [
        (node, name)
        for name, worker in answer.get("workers", {}).items()
        if worker["state"] == "ready"
        for node, report in worker["heartbeat"].get("nodes", {}).items()
        if node != trainer and report.get("oldest", {}).get(source) == group
    ]
    return holders[-1] if holders else ("", "")


def _mean(pasts: list[Mapping[str, Any]], key: str) -> float | None:
    values = [float(past[key]) for past in pasts if past.get(key) is not None]
    return sum(values) / len(values) if values else None


def _sum(reports: Iterable[Mapping[str, Any]], key: str) -> int:
    return sum(int(report.get(key, 0)) for report in reports)


def _least(statuses: Iterable[Mapping[str, Any]], key: str) -> int | None:
    values = [int(status[key]) for status in statuses if key in status]
    return min(values) if values else None


def describe_process(process: Process | None) -> str:
    """A process, as text."""
    if process is None:
        return "no process"
    if not process.state:
        return f"pid {process.pid}: no such process"
    cpu = "" if process.cpu is None else f", {process.cpu:.0%} of a core"
    return f"pid {process.pid}, state {process.state}, {process.rss_bytes / 2**20:,.0f} MiB{cpu}"
