"""Which accelerators each node has, and which nodes share theirs and take turns on them: pure
functions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from dataflow.errors import GraphError
from dataflow.node import Generate, Operator
from dataflow.planning.hosts import Devices
from dataflow.planning.placement import Need, Placement, Spot, ranges
from dataflow.structure import Structure

Wishes = Mapping[str, int | str]
"""Accelerators by node, or the name of the node whose devices it shares."""
Group = tuple[str, ...]
"""Nodes that share their devices."""


def read_wishes(graph: Structure, gpus: Wishes | str | None, count: int) -> Wishes:
    """The wishes of `--gpus`; `shared`: every node that computes shares all `count` accelerators,
    or main memory.

    Raises GraphError for another word.
    """
    if not isinstance(gpus, str):
        return gpus or {}
    if gpus != "shared":
        raise GraphError(
            f"gpus is '{gpus}', which says nothing; give a number or another node's name by node,"
            " as in generator=6,trainer=2, or 'shared' to have all nodes take turns on all devices"
        )
    first, *sharers = sorted(
        (name for name, operator in graph.operators.items() if operator.computes),
        key=lambda name: not isinstance(graph.operators[name], Generate),
    )
    return ({first: count} if count else {}) | dict.fromkeys(sharers, first)


def count_gpus(gpus: Wishes, devices: Devices) -> dict[str, int]:
    """By node: how many accelerators it has, those with a number of their own first; a node without
    any is left out.

    Raises GraphError where there are too few, or where one would share with a node that shares
    itself.
    """
    counts_asked = {name: wish for name, wish in gpus.items() if isinstance(wish, int)}
    for name, count in counts_asked.items():
        if count < 1:
            raise GraphError(
                f"'{name}' is given {count} GPUs; give 1 or more, or leave it out to use the CPU"
            )
    if sum(counts_asked.values()) > devices.gpus:
        where = f"its {len(devices.hosts)} hosts have" if devices.hosts else "this machine has"
        raise GraphError(
            f"the run asks for {sum(counts_asked.values())} GPUs, {counts_asked}, but {where}"
            f" {devices.gpus}; "
            f'ask for fewer, let operators share ("trainer": "generator"), or leave gpus= out to'
            f" run on the CPU"
        )
    counts = dict(counts_asked)
    for name, wish in gpus.items():
        if isinstance(wish, str) and (wish == name or isinstance(gpus.get(wish), str)):
            raise GraphError(
                f"'{name}' is to share the devices of '{wish}', which has none of its own; name a"
                " node that has"
            )
        if isinstance(wish, str) and wish in counts_asked:
            counts[name] = counts_asked[wish]
    return counts


def groups_of(graph: Structure, gpus: Wishes) -> tuple[Group, ...]:
    """Nodes that take turns on the devices of one of them, in the graph's order. GraphError where
    they cannot.
    """
    shared = {wish for wish in gpus.values() if isinstance(wish, str)}
    groups = tuple(
        tuple(name for name in graph.operators if name == host or gpus.get(name) == host)
        for host in sorted(shared)
    )
    for name in shared.difference(graph.operators):
        raise GraphError(
            f"devices of '{name}' are to be shared, but the graph has {list(graph.operators)};"
            " name one"
        )
    for group in groups:
        _check(graph, group)
    return groups


def _check(graph: Structure, group: Group) -> None:
    for name in group:
        operator = graph.operators[name]
        if not operator.computes:
            raise GraphError(f"'{name}' is to share devices, but it uses none; leave it out")
        if not operator.traits.sleeps:
            raise GraphError(
                f"'{name}' cannot take turns on devices with"
                f" {[mate for mate in group if mate != name]}: it keeps "
                f'its memory for as long as it runs (generators give it back with engine="native",'
                f" not compiled); "
                f"give it devices of its own"
            )


def awake_at_once(
    groups: Sequence[Group], needs: Iterable[tuple[str, str, Spot, Need]]
) -> list[tuple[str, Spot, Need]]:
    """Of all processes those that may be awake together where memory is scarcest: of nodes that
    take turns on a device, those of the one that needs most.

    needs: by process, its node, where it is and what it needs; returned without the node.
    """
    needs = list(needs)
    group_of = {node: number for number, group in enumerate(groups) for node in group}
    sums: dict[tuple[int, Spot], dict[str, int]] = {}
    for _, node, spot, need in needs:
        if node in group_of:
            by_node = sums.setdefault((group_of[node], spot), {})
            by_node[node] = by_node.get(node, 0) + need.total
    largest = {key: max(by_node, key=by_node.__getitem__) for key, by_node in sums.items()}
    return [
        (process, spot, need)
        for process, node, spot, need in needs
        if node not in group_of or largest[group_of[node], spot] == node
    ]


def at_once(groups: Sequence[Group], amounts: Mapping[str, int]) -> int:
    """The sum of what nodes need, processes or bytes; of nodes in turn only the largest counts."""
    together = sum(
        count for name, count in amounts.items() if not any(name in group for group in groups)
    )
    return together + sum(
        max((amounts.get(name, 0) for name in group), default=0) for group in groups
    )


def explain(groups: Iterable[Group], placements: Mapping[str, Placement]) -> list[str]:
    """A line per group: its nodes, and the devices on which they take turns."""
    lines = []
    for group in groups:
        names = ", ".join(f"'{name}'" for name in group[:-1]) + f" and '{group[-1]}'"
        widest = max(
            (placements[name] for name in group), key=lambda placement: len(placement.gpus)
        )
        first = widest.first_gpus[0] if widest.first_gpus else 0
        place = (
            f"gpu {ranges(gpu - first for gpu in widest.gpus)}" if widest.gpus else "main memory"
        )
        place += f" of host {widest.host(0)}" if widest.hosts else ""
        lines.append(
            f"{names} take turns on {place}: one is awake at a time, the others have given their"
            " memory back and wait until its work is done"
        )
    return lines


def threads_of(
    groups: Sequence[Group], heavy: Mapping[str, tuple[int, int]], cpus: int, *, synchronous: bool
) -> int:
    """Threads of each process on the CPU of one machine: all cores where they take turns, else an
    equal share.

    heavy: by node that computes there, its replicas and the ranks of each. synchronous: no node
    runs ahead of another.
    """
    if synchronous and sum(count for count, _ in heavy.values()) <= 2:
        processes = max((ranks for _, ranks in heavy.values()), default=1)
    else:
        processes = at_once(groups, {name: count * ranks for name, (count, ranks) in heavy.items()})
    return max(1, cpus // max(1, processes))


# How many processes share out one replica of an operator, and how often it may run.


def ranks_of(operator: Operator, gpus: int, wish: int | None, one_process: bool) -> int:
    """Processes that share out one replica of an operator; its worker starts all but the first."""
    name, traits = operator.name, operator.traits
    unit = traits.split.least_ranks
    if not operator.trains:
        if wish is not None:
            raise GraphError(
                f"'{name}' is given {wish} ranks, but it trains nothing; ranks= is for trainers;"
                " give it replicas=, or its own tensor_parallel"
            )
        if gpus % unit:
            raise GraphError(
                f"'{name}' is given {gpus} GPUs, but each of its replicas takes {unit}"
                f" (tensor_parallel); give it a multiple of {unit}, or another tensor_parallel"
            )
        if one_process and unit > 1 and not isinstance(operator, Generate):
            raise GraphError(
                f"'{name}' has tensor_parallel={unit}, but a run in one process has one of"
                " everything; use tensor_parallel=1, or run in processes"
            )
        return unit
    if wish is not None and (wish < 1 or (gpus and wish != gpus)):
        raise GraphError(
            f"'{name}' is given {wish} ranks{f' and {gpus} GPUs' if gpus else ''}; give it 1 rank"
            " or more, and on GPUs leave ranks= out: each GPU is one"
        )
    ranks = gpus or (unit if wish is None else wish)
    if ranks % unit:
        has = {knob: size for knob, size in asdict(traits.split).items() if size > 1}
        raise GraphError(
            f"'{name}' runs on {ranks} ranks, but has"
            f" {' and '.join(f'{knob}={size}' for knob, size in has.items())}, which does not"
            f" divide them; give it a multiple of {unit} ranks, or another {' or '.join(has)}"
        )
    if one_process and ranks > 1:
        raise GraphError(
            f"'{name}' is to run on {ranks} ranks, but a run in one process has one of everything;"
            " use tensor_parallel=1, dp_replicate=1 and 1 rank, or run in processes"
        )
    return ranks


def check_replicas(operator: Operator, count: int) -> None:
    """Refuse a number of replicas that an operator cannot have."""
    if count < 1 or (count > 1 and (operator.trains or operator.light)):
        raise GraphError(
            f"'{operator.name}' cannot run as {count} replicas; give 1 or more, to generators and"
            " forward operators only"
        )


def check_scaled(operator: Operator, count: int, has: int) -> None:
    """Refuse a number of replicas that an operator cannot have from some step of a run on. has:
    those that it has.
    """
    check_replicas(operator, count)
    if count != has and isinstance(operator, Generate) and operator.asks is not None:
        raise GraphError(
            f"'{operator.name}' is an episode of {has} replicas, and cannot have {count} from some"
            f" step on, as its generator knows from the start whom it answers; give {count}"
            " replicas at the start of a run, or more in its pool: @episode(processes=...),"
            " agent(concurrency=...)"
        )
