"""Ways to place a graph: pure enumeration; nothing is checked yet."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any

from dataflow.foresight.catalogue import DeviceKind, device_kind
from dataflow.foresight.counts import counts_of, decoder_of, size_of
from dataflow.foresight.foresee import only
from dataflow.foresight.rates import ASSUMED, Rates
from dataflow.foresight.training import Learners, waits_s
from dataflow.foresight.workload import Workload
from dataflow.graph import Graph
from dataflow.node import Generate, Learn, Operator
from dataflow.planning.gpu_groups import Wishes
from dataflow.planning.hosts import Devices, Host
from dataflow.planning.memory_need import by_way, first_way, need_of
from dataflow.structure import group_size, sources_of

# How a trainer's ranks share its model out: the way that fits into their memory and takes the
# least time.

PARALLEL = (1, 2, 4, 8)
"""Ranks that share out a layer, those of one host at most."""


def deals_out(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether a model's heads can be dealt out to so many ranks; several may hold the same keys and
    values.

    >>> [ranks for ranks in (1, 2, 3, 4, 8) if deals_out(12, 2, ranks)]
    [1, 2, 4]
    """
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def learners(trainer: Learn, hosts: Sequence[Host]) -> list[dict[str, Any]]:
    """Knobs of a trainer that may differ from what it declares: ranks that share out its heads and
    stand on one host, copies of the model, a power of two, and moments of half the bytes, which no
    step is faster by; the declared ones first, then those that cut and copy least.
    """
    fields = {field.name for field in dataclasses.fields(trainer)}
    if trainer.uses is None or not {"tensor_parallel", "dp_replicate"} <= fields:
        return [{}]
    decoder, gpus = decoder_of(trainer.uses.source), sum(host.gpus for host in hosts)
    most = max((host.gpus for host in hosts), default=1)
    widths = [
        width
        for width in PARALLEL
        if width <= most and deals_out(decoder.heads, decoder.kv_heads, width)
    ]
    copies = [1 << power for power in range(gpus.bit_length())]
    declared = asdict(trainer.traits.split)
    ways = [
        {"tensor_parallel": width, "dp_replicate": count}
        for width in widths
        for count in copies
        if width * count <= gpus
    ]
    splits = [
        {},
        *(
            {knob: size for knob, size in way.items() if size != declared[knob]}
            for way in ways
            if way != declared
        ),
    ]
    if "moments" not in fields or trainer.traits.training.moment_bytes < 4:
        return splits
    return [*splits, *({**way, "moments": "bfloat16"} for way in splits)]


@dataclass(frozen=True, kw_only=True)
class LearnerStep:
    """What a trainer's step is made of."""

    rollouts: float
    tokens: float
    """Of each, with its share of its group's prompt."""
    rates: Rates


def step_of(
    graph: Graph, trainer: Learn, generator: Operator, workload: Workload, rates: Rates
) -> LearnerStep:
    """The step's sizes, from graph and workload."""
    sizes = [group_size(graph, source) for source in sources_of(graph, trainer.name)]
    group = max(filter(None, sizes), default=1)
    tokens = workload.lengths(generator).mean + workload.prompt_tokens / group
    return LearnerStep(rollouts=float(trainer.step_prompts * group), tokens=tokens, rates=rates)


def best_learner(
    graph: Graph,
    trainer: Learn,
    ways: Sequence[Mapping[str, Any]],
    hosts: Sequence[Host],
    ranks: int,
    step: LearnerStep,
) -> Mapping[str, Any]:
    """By which of these ways so many ranks make a step in the least time, of those whose model
    fits; of equals the first; with other moments, where none else fits. The first one where none
    does: `plan` says why.

    hosts: on which they are; of unlike ones the slowest and the smallest count.
    """
    if len(ways) == 1:
        return ways[0]
    assert trainer.uses is not None, "one whose knobs are tried has a model"
    kind = min((device_kind(host.kind) for host in hosts), key=lambda each: each.rate("bfloat16"))
    room = min(host.gpu_memory_bytes for host in hosts)
    model, best, least = counts_of(trainer.uses.source), ways[0], float("inf")
    best_fits = False
    size = size_of(trainer.uses.source)
    for way in ways:
        if "moments" in way and best_fits:
            break
        variant: Any = dataclasses.replace(trainer, **way)
        traits = variant.traits
        if ranks % traits.split.least_ranks:
            continue
        needs = partial(need_of, graph, size=size, ranks=ranks, on_gpu=True)
        variant = by_way(variant, first_way(variant, needs, room))
        traits = variant.traits
        need = needs(variant)
        if need is not None and need.total > room:
            continue
        candidate = Learners(
            model=model, kind=kind, ranks=ranks, tensor_parallel=traits.split.tensor_parallel
        )
        forward = candidate.forward + traits.training.gradient_checkpointing
        passes = candidate.passes(
            step.rollouts, step.tokens, forward=forward, sequences=step.rollouts
        ).seconds(step.rates)
        seconds = passes + waits_s(
            candidate,
            traits.split.dp_replicate,
            step.rates,
            tokens=step.rollouts * step.tokens,
            at_once=traits.training.micro_batch_tokens,
            computing_s=passes,
        )
        if seconds < least * (1 - 1e-9):
            best, least, best_fits = way, seconds, True
    return best


MOST = 1000
"""About how many ways are looked at."""
SPLITS = 64
"""Ways to deal the same devices out to trainer and generator."""
_SHARES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625)
"""Of all devices, where some may be left unused."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way."""

    gpus: Mapping[str, int] = field(default_factory=dict)
    """Accelerators by node; empty on cores."""
    in_turn: tuple[str, ...] = ()
    """Nodes that take turns on the first one's accelerators; empty: each node has its own."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Knobs of the generator that differ from its declaration."""
    learner: Mapping[str, Any] = field(default_factory=dict)
    """Knobs of the trainer that differ from its declaration."""
    kinds: tuple[str, ...] = ()
    """Only accelerators of these kinds are used; empty: all."""
    trains_on: str = ""
    """The kind of the trainer's accelerators; empty: the first ones."""
    place: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Hosts by node, where the host matters."""

    @property
    def wishes(self) -> Wishes:
        """As `plan` has them."""
        return {**self.gpus, **dict.fromkeys(self.in_turn[1:], *self.in_turn[:1])}

    def count(self, node: str) -> int:
        """Accelerators of a node, its own or those that it shares; 0: it has none."""
        return self.gpus.get(self.in_turn[0] if node in self.in_turn else node, 0)

    @property
    def setting(self) -> str:
        """What it shares with candidates that divide the same devices differently."""
        return repr((sorted(self.knobs.items()), self.kinds, self.trains_on, bool(self.in_turn)))

    @property
    def declared(self) -> str:
        """What it shares with candidates whose graph is the same."""
        return repr((sorted(self.knobs.items()), sorted(self.learner.items())))

    def placed(self, graph: Graph) -> Graph:
        """The graph with these knobs; the one that is given stays as it is. GraphError where it
        refuses them.
        """
        for operator, knobs in self._declares(graph):
            graph = graph.swap(operator.name, dataclasses.replace(operator, **knobs))
        return graph

    def on(self, devices: Devices) -> Devices:
        """The devices that the candidate uses."""
        return (
            Devices.of([host for host in devices.hosts if host.kind in self.kinds])
            if self.kinds
            else devices
        )

    def flags(self, graph: Graph, devices: Devices) -> str:
        """The flags that ask for it, and the knobs that are to be declared."""
        flags = []
        if self.kinds:
            counts = {
                kind: sum(host.gpus for host in devices.hosts if host.kind == kind)
                for kind in self.kinds
            }
            flags.append(
                "--foresee " + "+".join(f"{count}x{kind}" for kind, count in counts.items())
            )
        for flag in ("gpus", "replicas", "ranks"):
            if wishes := self.wishes if flag == "gpus" else getattr(self, flag):
                flags.append(
                    f"--{flag} " + ",".join(f"{node}={count}" for node, count in wishes.items())
                )
        if self.place:
            flags.append(
                "--place "
                + ",".join(f"{node}={'+'.join(hosts)}" for node, hosts in self.place.items())
            )
        for operator, chosen in self._declares(graph):
            knobs = ", ".join(f"{knob}={value!r}" for knob, value in chosen.items())
            flags.append(f"{type(operator).__name__}({knobs})")
        return " ".join(flags)

    def _declares(self, graph: Graph) -> list[tuple[Any, Mapping[str, Any]]]:
        """Operators whose knobs differ from their declaration, with these knobs."""
        both: list[tuple[Any, Mapping[str, Any]]] = [
            (only(graph, Generate), self.knobs),
            (only(graph, Learn), self.learner),
        ]
        return [(operator, knobs) for operator, knobs in both if knobs]


def candidates(
    graph: Graph,
    devices: Devices,
    *,
    knobs: bool = True,
    idle: bool = False,
    workload: Workload | None = None,
    rates: Rates = ASSUMED,
) -> list[Candidate]:
    """Ways to place it on these devices, about a thousand at most.

    knobs: the generator's parallelism and precision, and for each number of ranks how the trainer's
    share its model out, are chosen too; else they are as declared. idle: devices may be left
    unused. workload, rates: by which a trainer's ways are compared.
    """
    if not devices.gpus:
        return _on_cores(graph, devices.cpus)
    names = list(dict.fromkeys(host.kind for host in devices.hosts if host.gpus))
    chosen: list[tuple[str, ...]] = [()]
    if knobs and len(names) > 1:
        chosen += [
            subset
            for count in range(1, len(names))
            for subset in itertools.combinations(names, count)
        ]
    deals = [
        (kinds, kind) for kinds in chosen for kind in _trainer_kinds(kinds or tuple(names), knobs)
    ]
    placed = []
    for kinds, kind in deals:
        subset = Candidate(kinds=kinds).on(devices)
        way = _learner(graph, subset, kind, knobs, workload or Workload(), rates)
        placed += _on_gpus(graph, subset, kinds, kind, knobs, idle, MOST // len(deals), way)
    return placed


def _learner(
    graph: Graph, devices: Devices, kind: str, chosen: bool, workload: Workload, rates: Rates
) -> Callable[[int], Mapping[str, Any]]:
    """The trainer's knobs by its ranks, which have the first devices of this kind, or of all."""
    if not chosen:
        return lambda ranks: {}
    trainer, generator = only(graph, Learn), only(graph, Generate)
    hosts = [host for host in devices.hosts if host.gpus and kind in ("", host.kind)]
    ways, step = learners(trainer, hosts), step_of(graph, trainer, generator, workload, rates)
    firsts = list(itertools.accumulate((host.gpus for host in hosts), initial=0))

    @cache
    def found(ranks: int) -> Mapping[str, Any]:
        theirs = [host for host, first in zip(hosts, firsts, strict=False) if first < ranks]
        return best_learner(graph, trainer, ways, theirs, ranks, step)

    return found


def _trainer_kinds(kinds: Sequence[str], chosen: bool) -> list[str]:
    """Kinds of devices that a trainer is tried on: the plan gives it the first ones, on others it
    is to be placed.
    """
    return ["", *kinds[1:]] if chosen else [""]


def seats(hosts: Sequence[Host], count: int) -> tuple[str, ...]:
    """The fewest hosts, the first ones, on which so many ranks of a trainer find room, as many on
    each; none: there is no such number.

    >>> from dataflow.foresight.command import read_devices
    >>> seats(read_devices("24xL40S").hosts, 16)
    ('L40S-0', 'L40S-1')
    """
    least = itertools.accumulate((host.gpus for host in hosts), min)
    for many, room in enumerate(least, start=1):
        if count % many == 0 and count // many <= room:
            return tuple(host.name for host in hosts[:many])
    return ()


def _on_gpus(
    graph: Graph,
    devices: Devices,
    kinds: tuple[str, ...],
    trains_on: str,
    knobs: bool,
    idle: bool,
    most: int,
    learner: Callable[[int], Mapping[str, Any]],
) -> list[Candidate]:
    trainer, generator = only(graph, Learn), only(graph, Generate)
    helper_gpus = {
        name: operator.traits.split.least_ranks
        for name, operator in graph.operators.items()
        if operator.uses is not None and operator not in (trainer, generator) and not operator.light
    }
    free = devices.gpus - sum(helper_gpus.values())
    ways = generators(generator, devices) if knobs else [{}]
    totals = (
        range(2, free + 1)
        if idle and free <= 16
        else sorted(
            {int(free * share) for share in (_SHARES if idle else (1.0,)) if free * share >= 2},
            reverse=True,
        )
    )
    each_way = max(4, min(SPLITS, most // (len(ways) * max(1, len(totals))))) if knobs else SPLITS
    hosts = [host for host in devices.hosts if host.gpus and trains_on in ("", host.kind)]
    seated = cache(lambda ranks: seats(hosts, ranks))
    apart = [
        Candidate(
            gpus={generator.name: makes, trainer.name: total - makes, **helper_gpus},
            knobs=way,
            kinds=kinds,
            learner=learner(total - makes),
            trains_on=trains_on,
            place={trainer.name: seated(total - makes)} if trains_on else {},
        )
        for way in ways
        for total in totals
        for makes in splits(
            total,
            way.get("tensor_parallel", generator.traits.split.tensor_parallel),
            1 if knobs else trainer.traits.split.least_ranks,
            each_way,
            lambda ranks: bool(seated(ranks)),
        )
    ]
    sharing = (generator.name, trainer.name, *helper_gpus)
    most_shared = max((host.gpus for host in hosts), default=0)  # the turn is on one host
    return apart + [
        Candidate(
            gpus={generator.name: total},
            in_turn=sharing,
            knobs=way,
            kinds=kinds,
            learner=learner(total),
            trains_on=trains_on,
        )
        for way in ways
        for total in dict.fromkeys([devices.gpus, *totals] if not idle else [1, *totals])
        if total <= most_shared
        and not trains_on
        and total % way.get("tensor_parallel", generator.traits.split.tensor_parallel) == 0
        and total % (1 if knobs else trainer.traits.split.least_ranks) == 0
    ]


def generators(generator: Operator, devices: Devices) -> list[dict[str, Any]]:
    """Knobs of a generator that may differ from what it declares: ranks that share out its heads
    and stand on one host, fp8 where all devices multiply in it; the declared ones first.
    """
    fields = {field.name for field in dataclasses.fields(generator)}
    declared, widths = generator.traits.split.tensor_parallel, [1]
    assert generator.uses is not None, "a generator has a model"
    if "tensor_parallel" in fields:
        decoder = decoder_of(generator.uses.source)
        most = max((host.gpus for host in devices.hosts), default=devices.cpus)
        widths = [
            width
            for width in PARALLEL
            if width <= most and deals_out(decoder.heads, decoder.kv_heads, width)
        ]
    ways: list[dict[str, Any]] = [
        {},
        *({"tensor_parallel": width} for width in widths if width != declared),
    ]
    kinds: list[DeviceKind] = [
        device_kind(host.kind) for host in devices.hosts if host.gpus and host.kind
    ]
    narrow = bool(kinds) and all("fp8" in kind.operations_per_s for kind in kinds)
    if (
        narrow
        and getattr(generator, "weights", None) == "model"
        and generator.uses.dtype == "bfloat16"
    ):
        ways += [{**way, "weights": "fp8"} for way in ways]
    return ways


def splits(
    free: int,
    unit: int,
    trainer_unit: int,
    most: int,
    seated: Callable[[int], bool] = lambda ranks: True,
) -> list[int]:
    """Devices of the generator, in whole replicas of so many; the trainer has the rest, where such
    ranks find seats. Of too many, those that leave the trainer whole hosts of eight, and of these
    as many, evenly.

    >>> splits(8, 2, 1, 64)
    [2, 4, 6]
    """
    counts = [
        makes
        for makes in range(unit, free, unit)
        if (free - makes) % trainer_unit == 0 and seated(free - makes)
    ]
    if len(counts) > most:
        counts = [makes for makes in counts if (free - makes) % 8 == 0] or counts
    step = max(1, -(-len(counts) // most))
    return counts[step - 1 :: step]


def _on_cores(graph: Graph, cores: int) -> list[Candidate]:
    """Replicas and ranks, and ranks of each replica: as many as there are cores, at most."""
    trainer, generator = only(graph, Learn), only(graph, Generate)
    counts = _counts(cores)
    unit = trainer.traits.split.least_ranks
    return [
        Candidate(
            replicas={generator.name: replicas},
            ranks={trainer.name: ranks},
            knobs=way,
        )
        for way in generators(generator, Devices(cpus=cores))
        for replicas in counts
        if replicas * way.get("tensor_parallel", generator.traits.split.tensor_parallel)
        <= 2 * cores
        for ranks in counts
        if ranks % unit == 0
    ]


def _counts(most: int) -> Sequence[int]:
    return [count for count in (*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128) if count <= most]
