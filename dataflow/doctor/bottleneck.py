"""Which node bounds a run under way: the one that, made faster, makes it faster; pure."""

from dataflow.doctor.facts import Facts
from dataflow.history.bottleneck import BusyShare, alike, bounding, groups, heaviest


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
