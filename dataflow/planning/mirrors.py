"""Which readers of a host share one way of a trainer's weights over the network: a pure function of
the paths.

One of them, the mirror, takes each version in, and hands it to the others through shared memory.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from dataflow.planning.executors import WeightPath
from dataflow.planning.hosts import named
from dataflow.weight_ends import Refresh

LEAST = 1.5
"""Models that the readers of a host would take over the network: from there on one model is worth
being handed on."""

Shared = tuple[str, Refresh | None, str]
"""Trainer, which of its versions, and the host that reads them."""


def mirrored(paths: Sequence[WeightPath]) -> tuple[WeightPath, ...]:
    """The paths, with the mirror of those that have one: the first reader of its host in the order
    of the graph.

    Readers on other hosts than their trainer, which gloo reaches, share one where that is less
    traffic: what all of their ranks would take is more than one model. Where the size is unknown,
    where there are at least two readers.
    """
    found: dict[WeightPath, WeightPath] = {}
    for _, group in itertools.groupby(sorted(paths, key=_order), key=_order):
        there = list(group)
        if _pays(there):
            found |= {path: replace(path, mirror=there[0].name) for path in there}
    return tuple(found.get(path, path) for path in paths)


def readers_beside(
    paths: Sequence[WeightPath], trainer: str, refresh: Refresh | None, host: str
) -> tuple[str, ...]:
    """Those of a host that share one way, the mirror first; none where each has its own."""
    return tuple(
        path.name
        for path in paths
        if path.mirror and (path.trainer, path.refresh, path.host) == (trainer, refresh, host)
    )


def mirror_lines(paths: Sequence[WeightPath]) -> list[str]:
    """For people: who takes versions for whom, those that are alike on one line."""
    shared: dict[Shared, list[WeightPath]] = {}
    for path in paths:
        if path.mirror:
            shared.setdefault((path.trainer, path.refresh, path.host), []).append(path)
    alike: dict[tuple[str, str, int], list[tuple[str, str]]] = {}
    for (trainer, refresh, host), there in shared.items():
        readers = ", ".join(dict.fromkeys(path.reader for path in there))
        told = f"{trainer} ({refresh})" if refresh is not None else trainer
        alike.setdefault((told, readers, len(there)), []).append((host, there[0].mirror))
    lines = []
    for (trainer, readers, count), hosts in alike.items():
        where, first = named(host for host, _ in hosts), hosts[0][1]
        who = f"'{first}'" if len(hosts) == 1 else f"one ('{first}' on {hosts[0][0]})"
        others = f"{count - 1} other{'s' if count > 2 else ''}" if count > 1 else "all of its ranks"
        lines.append(
            f"weights {trainer} -> {where}: of {count} reader{'s' if count > 1 else ''} ({readers})"
            f" {'of each host ' if len(hosts) > 1 else ''}{who} takes each version over the"
            f" network, and hands it to {others} in shared memory"
        )
    return lines


def _order(path: WeightPath) -> tuple[str, str, str]:
    return path.trainer, str(path.refresh), path.host


def _pays(there: Sequence[WeightPath]) -> bool:
    if any(not path.is_apart or path.executor != "gloo" or path.is_forced for path in there):
        return False
    if any(path.nbytes is None or not path.whole_bytes for path in there):
        return len(there) > 1
    return sum(path.ranks * (path.nbytes or 0) for path in there) >= LEAST * max(
        path.whole_bytes or 0 for path in there
    )
