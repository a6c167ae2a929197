"""One sentence on a run: what everything waits for, or that nothing is wrong; pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dataflow.display import EdgeSnapshot
from dataflow.doctor.facts import (
    AWAY,
    SILENT_S,
    Awaited,
    Facts,
    Node,
    WorkerFacts,
)
from dataflow.history.bottleneck import ALIKE, BusyShare, alike, bounding, groups, heaviest

# Which node waits for which: a walk over the graph from facts to waits; pure.

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
    reached = {start} | _reach(start, following)
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


def _live_edges(facts: Facts, node: Node) -> list[EdgeSnapshot]:
    """Edges on which rows should come now: of the sources that the run waits for."""
    ending = [edge for edge in facts.edges if edge.consumer == node.name]
    live = [edge for edge in ending if (edge.source in facts.on_demand) == facts.evaluating]
    if facts.phase == "first_evaluation":
        live = live or ending
    return [edge for edge in live if facts.nodes[edge.producer].state != "done"]


# Which node bounds a run under way: the one that, made faster, makes it faster; pure.


def loads(facts: Facts) -> list[BusyShare]:
    """Loads of workers, and of nodes that take turns on devices, the heaviest first."""
    busy = {
        name: node.busy
        for name, node in facts.nodes.items()
        if node.busy is not None and node.state != "done"
    }
    workers = {
        name: frozenset(worker.name for worker in facts.nodes[name].workers) for name in busy
    }
    beside = {name: facts.nodes[name].beside or 0.0 for name in busy}
    return heaviest(busy, beside, groups(list(busy), [*alike(workers), *facts.turns]))


def bottleneck(facts: Facts) -> str | None:
    """The node that bounds the run; None where none is known to have worked."""
    return bounding(loads(facts), list(facts.nodes))


MOVES_S = 10.0
"""A run in which something moved within so many seconds is under way."""
_LONG_SLICE_S = 30.0
_BUSY = 0.5
"""A part that is busy for a smaller share delays nobody."""


def verdict(facts: Facts, *, moves_s: float = MOVES_S) -> str:
    """The root of the waiting, named first. moves_s: without movement for so long, a run is not
    well.
    """
    all_waits = waits(facts)
    reached = ends(facts, all_waits)
    ill = [name for name, node in facts.nodes.items() if troubled(node)]
    if facts.phase == "starting":
        return _starting(facts)
    if ill:
        root = _most(facts, {name: reached.get(name, []) for name in ill})
        return _ill(facts, root, reached.get(root, []), all_waits)
    if facts.still_s < moves_s:
        return _fine(facts)
    if not reached:
        return (
            f"Nothing has moved for {seconds(facts.still_s)};"
            f" {_at_work(facts) or 'no node says why'}."
        )
    root = _most(facts, reached)
    if any(wait.node == root for wait in all_waits):
        return _circle(facts, [name for name in reached if root in reached[name]], all_waits)
    return f"{_who(reached[root], root, all_waits)} '{root}', which {_doing(facts.nodes[root])}."


def _starting(facts: Facts) -> str:
    """The verdict while workers start: workers that only wait for others do not delay the start."""
    late = [worker for worker in facts.workers.values() if worker.state != "ready"]
    slow = [
        worker
        for worker in late
        if worker.at or worker.state != "starting" or worker.silent_s > SILENT_S
    ]
    if not late:
        return "The run is starting; all workers are ready."
    return (
        "The run is starting; it waits for"
        f" {_list([f'{_named(w)}, which {_is(w)}' for w in slow or late])}."
    )


def _most(facts: Facts, reached: Mapping[str, list[str]]) -> str:
    """The node that the run's present sink waits for; else the one that most nodes wait for."""
    held_out = {edge.consumer for edge in facts.edges if edge.source in facts.on_demand}
    sinks = {name for name in held_out if facts.nodes[name].kind == "sink"}
    goals = sinks if facts.evaluating else set(facts.leading)
    order = list(facts.nodes)
    return max(
        reached,
        key=lambda name: (
            bool(goals & {name, *reached[name]}),
            len(reached[name]),
            -order.index(name),
        ),
    )


def _ill(facts: Facts, root: str, waiting: list[str], all_waits: list[Wait]) -> str:
    workers = troubled(facts.nodes[root])
    troubles = _list([f"{_named(worker)} {_is(worker)}" for worker in workers])
    if not waiting:
        healthy = len(facts.nodes[root].workers) - len(workers)
        so_far = "the others carry on" if healthy else "nobody waits for it yet"
        return f"Something is the matter with '{root}': {troubles}; {so_far}."
    return f"{_who(waiting, root, all_waits)} '{root}': {troubles}."


def _fine(facts: Facts) -> str:
    shares = loads(facts)
    if facts.evaluating:
        return f"Nothing is wrong: the run is in its {facts.phase.replace('_', ' ')}."
    if not shares:
        return "Nothing is wrong: rows move."
    most = shares[0].share
    if most < _BUSY:
        return (
            f"Nothing is wrong: rows move, and '{shares[0].node}' is busiest, busy"
            f" {shares[0].busy:.0%}."
        )
    slowest = [load.node for load in shares if load.share > most - ALIKE]
    if len(slowest) > 1:
        parts = [repr(name) for name in facts.nodes if name in slowest]
        return f"Nothing is wrong: {_list(parts)} are the slowest parts, busy {most:.0%}."
    shared = (
        f", and those that work in turn with it make that {most:.0%}" if shares[0].is_shared else ""
    )
    return (
        f"Nothing is wrong: '{slowest[0]}' is the slowest part, busy {shares[0].busy:.0%}{shared}."
    )


def _circle(facts: Facts, names: list[str], all_waits: list[Wait]) -> str:
    whys = [
        f"'{wait.node}' waits for '{wait.on}' ({wait.why})"
        for wait in all_waits
        if wait.node in names
    ]
    return f"{_list([repr(name) for name in names])} wait for each other: {'; '.join(whys)}."


def _doing(node: Node) -> str:
    slices = [worker for worker in node.workers if worker.at == node.name]
    if node.state == "working" and slices and slices[0].at_s >= _LONG_SLICE_S:
        return (
            f"has been in one slice of its work for {seconds(slices[0].at_s)} ({_named(slices[0])})"
        )
    if node.state == "working":
        return f"is at work, for {seconds(node.for_s)} now"
    if node.state == "done":
        return "is done"
    if node.pending and node.kind != "source":
        return f"holds {node.pending} rows and has not worked on them for {seconds(node.for_s)}"
    if node.kind == "source":
        return f"has issued nothing for {seconds(node.for_s)}"
    return f"waits for nobody, and has done nothing for {seconds(node.for_s)}"


def _at_work(facts: Facts) -> str:
    return _list(
        [
            f"'{name}' {_doing(node)}"
            for name, node in facts.nodes.items()
            if node.state == "working"
        ]
    )


def _who(waiting: list[str], root: str, all_waits: list[Wait]) -> str:
    everybody = {wait.node for wait in all_waits}
    if len(everybody) > 1 and everybody - {root} <= set(waiting):
        return "Everything waits for"
    return (
        f"{_list([repr(name) for name in waiting])} {'wait' if len(waiting) > 1 else 'waits'} for"
    )


def _named(worker: WorkerFacts) -> str:
    return (
        f"{worker.name} (pid {worker.process.pid})" if worker.process is not None else worker.name
    )


def _is(worker: WorkerFacts) -> str:
    return trouble(worker) or "is ready"


def _list(parts: list[str]) -> str:
    return (
        parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""
    )
