"""Which node waits for which: a walk over the graph from facts to waits; pure."""

from collections.abc import Collection
from dataclasses import dataclass

from dataflow.doctor.facts import AWAY, Awaited, EdgeFacts, Facts, Node, WorkerFacts

SILENT_S = 2.0
"""A worker beats five times a second; one without a message for so long does not answer."""
LONG_SLICE_S = 2.0
"""A worker's other nodes wait for a slice that takes longer."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """One node waits for another."""

    node: str
    on: str
    why: str


def trouble(worker: WorkerFacts) -> str:
    """What is wrong with a worker, to follow its name in a sentence; empty: nothing."""
    process = worker.process
    if worker.state in ("stopping", "left"):
        return ""
    if worker.state == "down":
        return _away(worker)
    if worker.state == "gone" or (process is not None and process.state in ("", "Z")):
        return "has ended"
    if process is not None and process.state in ("T", "t"):
        return (
            f"is stopped (state {process.state} in /proc) and does not answer, for"
            f" {seconds(worker.silent_s)} now"
        )
    if worker.state in AWAY:
        return _away(worker)
    if worker.silent_s > SILENT_S:
        state = f" (state {process.state} in /proc)" if process is not None else ""
        return f"does not answer{state}, for {seconds(worker.silent_s)} now"
    return ""


def troubled(node: Node) -> list[WorkerFacts]:
    """The workers of a node with which something is wrong."""
    return [worker for worker in node.workers if trouble(worker)]


def waits(facts: Facts) -> list[Wait]:
    """Every wait there is, in the graph's order; a node that works, rests or is in trouble waits
    for nobody.
    """
    return [wait for node in facts.nodes.values() for wait in waits_of(facts, node)]


def waits_of(facts: Facts, node: Node) -> list[Wait]:
    """The waits of one node."""
    if troubled(node) or node.state in ("working", "done"):
        return []
    if wait := _behind(node):
        return [wait]
    if node.state == "blocked":
        return _blocked(facts, node)
    if node.kind == "source":
        return _paused(facts, node)
    if node.held_back and (found_weights := _weights(facts, node)):
        return found_weights
    awaited = facts.awaited.get(node.name)
    if awaited is not None and not facts.evaluating:
        return [_group(facts, node, awaited)]
    if node.pending and node.kind != "sink" and not node.held_back:
        return []
    return [
        Wait(node=node.name, on=edge.producer, why=f"nothing comes from '{edge.producer}'")
        for edge in _live_edges(facts, node)
    ]


def ends(facts: Facts, all_waits: Collection[Wait]) -> dict[str, list[str]]:
    """By node at which chains of waits end, the nodes that wait for it; a circle ends at each of
    its nodes.
    """
    following: dict[str, list[str]] = {}
    for wait in all_waits:
        following.setdefault(wait.node, []).append(wait.on)
    reached: dict[str, list[str]] = {}
    for start in following:
        for end in sorted(_ends_of(start, following), key=list(facts.nodes).index):
            reached.setdefault(end, []).append(start)
    return reached


def seconds(value: float) -> str:
    """A time as text: 0.4 s, 12 s, 3 min 20 s."""
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 119.5:
        return f"{value:.0f} s"
    minutes, remainder = divmod(round(value), 60)
    return (
        f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {remainder} s"
    )


def _away(worker: WorkerFacts) -> str:
    again = f" again (restart {worker.restarts})" if worker.restarts else ""
    because = f"; it {worker.cause}" if worker.cause else ""
    if worker.state == "down":
        return f"has ended, and waits to be started{again}{because}"
    if worker.state == "dying":
        return f"is being killed{because}"
    if worker.state == "forked":
        return (
            f"has not said hello{again}, {seconds(worker.silent_s)} after it was asked for{because}"
        )
    doing = (
        f"builds '{worker.at}' for {seconds(worker.at_s)} now"
        if worker.at
        else "waits for the others to start"
    )
    return f"is starting{again}: it {doing}{because}"


def _ends_of(start: str, following: dict[str, list[str]]) -> set[str]:
    reached, todo = {start}, [start]
    while todo:
        for name in following.get(todo.pop(), ()):
            if name not in reached:
                reached.add(name)
                todo.append(name)
    last = {name for name in reached if name not in following}
    return last or {name for name in reached if name in _reach(name, following)}


def _reach(start: str, following: dict[str, list[str]]) -> set[str]:
    """The nodes that one node reaches by at least one wait."""
    reached: set[str] = set()
    todo = list(following.get(start, ()))
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += following.get(name, ())
    return reached


def _behind(node: Node) -> Wait | None:
    """A node cannot work while its worker is in a long slice of another's."""
    slices = [w for w in node.workers if w.at and w.at != node.name and w.at_s > LONG_SLICE_S]
    if not slices or len(slices) < len(node.workers):
        return None
    worker = slices[0]
    why = (
        f"they share {worker.name}, which has been in one slice of '{worker.at}' for"
        f" {seconds(worker.at_s)}"
    )
    return Wait(node=node.name, on=worker.at, why=why)


def _blocked(facts: Facts, node: Node) -> list[Wait]:
    edges = [edge for edge in facts.edges if edge.producer == node.name]
    full = [edge for edge in edges if edge.is_full]
    if full:
        room = "the edge to '{}' is full ({} of {} rows)"
        return [
            Wait(node=node.name, on=e.consumer, why=room.format(e.consumer, e.depth, e.capacity))
            for e in full
        ]
    stuck = [edge for edge in edges if troubled(facts.nodes[edge.consumer])] or edges
    return [
        Wait(node=node.name, on=e.consumer, why=f"'{e.consumer}' gives no room for rows")
        for e in stuck
    ]


def _paused(facts: Facts, node: Node) -> list[Wait]:
    """Sources wait for nobody, but for the evaluation that comes before the first step."""
    if node.name in facts.on_demand or facts.phase != "first_evaluation":
        return []
    sinks = [name for name in facts.nodes if set(_sources(facts, name)) & set(facts.on_demand)]
    return [
        Wait(node=node.name, on=name, why="it is paused until the first evaluation is done")
        for name in sinks
        if facts.nodes[name].kind == "sink"
    ]


def _weights(facts: Facts, node: Node) -> list[Wait]:
    on_weights = []
    for feedback in facts.feedbacks:
        if feedback.reader == node.name:
            trainer = facts.nodes[feedback.trainer]
            newest, has = trainer.version, node.version
            newest = None if newest is None else newest // feedback.every * feedback.every
            if trainer.state == "done" and newest == has:
                continue
            if newest is not None and has is not None and newest > has:
                why = f"version {newest} of '{feedback.trainer}' is made, but it still has {has}"
            else:
                why = f"{node.held_back} prompts may start only with weights after version {has}"
            on_weights.append(Wait(node=node.name, on=feedback.trainer, why=why))
    return on_weights


def _group(facts: Facts, node: Node, awaited: Awaited) -> Wait:
    """The trainer takes groups in order: it waits for whoever has the next one."""
    path = _path(facts, node.name, awaited.source)
    idle = [name for name in path if _is_idle(facts.nodes[name])]
    if awaited.node:
        holder = awaited.node
    elif awaited.state in ("issued", "generating") or len(path) < 2:
        holder = (path or [awaited.source])[0]
    else:
        holder = next((name for name in path[1:] if name not in idle), path[-1])
    at = f" and {awaited.worker} has" if awaited.worker else ""
    why = f"it needs group {awaited.group_id} next, which the ledger calls {awaited.state}{at}"
    return Wait(node=node.name, on=holder, why=why)


def _is_idle(node: Node) -> bool:
    return node.state in ("waiting", "starved") and not node.pending and not troubled(node)


def _path(facts: Facts, sink: str, source: str) -> list[str]:
    """Operators between a source and a sink, in the graph's order."""
    before = {sink}
    for name in reversed(list(facts.nodes)):
        if any(
            e.producer == name and e.consumer in before and e.source == source for e in facts.edges
        ):
            before.add(name)
    return [name for name in facts.nodes if name in before and name not in (sink, source)]


def _sources(facts: Facts, name: str) -> list[str]:
    return [edge.source for edge in facts.edges if edge.consumer == name]


def _live_edges(facts: Facts, node: Node) -> list[EdgeFacts]:
    """Edges on which rows should come now: of the sources that the run waits for."""
    ending = [edge for edge in facts.edges if edge.consumer == node.name]
    live = [edge for edge in ending if (edge.source in facts.on_demand) == facts.evaluating]
    if facts.phase == "first_evaluation":
        live = live or ending
    return [edge for edge in live if facts.nodes[edge.producer].state != "done"]
