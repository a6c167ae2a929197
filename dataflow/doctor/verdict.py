"""One sentence on a run: what everything waits for, or that nothing is wrong; pure."""

from collections.abc import Mapping

from dataflow.doctor.bottleneck import loads
from dataflow.doctor.facts import Facts, Node, WorkerFacts
from dataflow.doctor.waiting import SILENT_S, Wait, ends, seconds, trouble, troubled, waits
from dataflow.history.bottleneck import ALIKE

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
