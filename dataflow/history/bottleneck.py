"""Which node bounds a run, by the shares of their time that nodes are at work; pure.

Nodes of one worker run one after the other, and so do nodes that take turns on devices: what one of
them saves, all of them gain. So it is their sum that bounds a run, and the largest part of it that
is worth making smaller.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

ALIKE = 0.02
"""Shares that differ by less count as equal."""


@dataclass(frozen=True, kw_only=True)
class BusyShare:
    """The share of the time in which nodes are busy that can only work one after the other."""

    share: float
    """Of all of them together: 1 means that no time is left."""
    node: str
    """The busiest of them, and its own share."""
    busy: float

    @property
    def is_shared(self) -> bool:
        """Whether other nodes have a part in it."""
        return self.share > self.busy + 0.01


def heaviest(
    busy: Mapping[str, float], beside: Mapping[str, float], grouped: Iterable[Sequence[str]]
) -> list[BusyShare]:
    """The load of each group of nodes, and of the processes that a node has beside its worker; the
    heaviest first.

    >>> busy = {"draw": 0.6, "judge": 0.4, "credit": 0.3}
    >>> heaviest(busy, {}, [["draw"], ["judge", "credit"]])[0].node
    'judge'
    """
    own = {name: share - beside.get(name, 0.0) for name, share in busy.items()}
    loads = [
        BusyShare(share=busy[name], node=name, busy=busy[name]) for name in busy if beside.get(name)
    ]
    for group in grouped:
        most = max(group, key=lambda name: own[name])
        loads.append(BusyShare(share=sum(own[name] for name in group), node=most, busy=busy[most]))
    return sorted(loads, key=lambda load: -load.share)


def bounding(loads: Sequence[BusyShare], order: Sequence[str]) -> str | None:
    """The node that bounds a run; None where none has worked. order: that of the graph.

    Of loads that are alike it is the last on the way: those before it are at work as long as the
    queue to it grows.

    >>> draw = BusyShare(share=1.0, node="draw", busy=1.0)
    >>> train = BusyShare(share=0.99, node="train", busy=0.99)
    >>> bounding([draw, train], ["draw", "train"])
    'train'
    """
    alike_ones = [
        load.node for load in loads if load.share > loads[0].share - ALIKE and load.busy > 0
    ]
    return max(alike_ones, key=list(order).index, default=None)


def bounded(
    seconds: float | None,
    busy: Mapping[str, float],
    beside: Mapping[str, float],
    config: Mapping[str, Any],
) -> BusyShare | None:
    """What bounded a run in so many seconds, the node that has the largest part in it, and the
    efficiency: the share of the time in which it was at work. None where nothing is known to have
    worked.

    busy, beside: by node, seconds at work, and those of its own processes among them, in the mean
    of its replicas. config: which worker had which node, and which nodes took turns, as config.json
    has it.

    >>> light = {"worker": "light"}
    >>> placed = {"draw": {"worker": "draw"}, "judge": light, "credit": light}
    >>> bounded(10.0, {"draw": 6.0, "judge": 4.0, "credit": 3.0}, {}, {"placed": placed})
    BusyShare(share=0.7, node='judge', busy=0.4)
    """
    placed = config.get("placed") or {}
    order = [
        *(name for name in placed if name in busy),
        *(name for name in busy if name not in placed),
    ]
    if not seconds or not order:
        return None
    workers = {name: str((placed.get(name) or {}).get("worker", name)) for name in order}
    loads = heaviest(
        {name: busy[name] / seconds for name in order},
        {name: spent / seconds for name, spent in beside.items()},
        groups(order, [*alike(workers), *config.get("turns", ())]),
    )
    node = bounding(loads, order)
    load = next((load for load in loads if load.node == node), None)
    return None if load is None else replace(load, share=min(1.0, load.share))


def groups(names: Sequence[str], together: Iterable[Iterable[str]]) -> list[list[str]]:
    """The names in their order, grouped where they must be."""
    group_of = {name: name for name in names}
    for some in together:
        joined = {group_of[name] for name in some if name in group_of}
        first = next((name for name in names if group_of[name] in joined), "")
        group_of = {name: first if group in joined else group for name, group in group_of.items()}
    return [
        [name for name in names if group_of[name] == first]
        for first in dict.fromkeys(group_of.values())
    ]


def alike(workers: Mapping[str, Hashable]) -> list[list[str]]:
    """Nodes that have the same workers."""
    return [
        [name for name in workers if workers[name] == these]
        for these in dict.fromkeys(workers.values())
    ]
