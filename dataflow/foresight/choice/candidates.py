"""Ways in which a graph could be placed: pure enumeration, which nobody has checked yet."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataflow.foresight.catalogue import DeviceKind, device_kind
from dataflow.foresight.counts import decoder_of
from dataflow.foresight.foresee import only
from dataflow.graph import Graph
from dataflow.node import Generate, Learn, Operator
from dataflow.planning.hosts import Devices

MOST = 1000
"""Ways that are looked at, about."""
SPLITS = 64
"""Ways to deal the same devices out to trainer and generator."""
_PARALLEL = (1, 2, 4, 8)
_SHARES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625)
"""Of all devices, where some may be left unused."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way."""

    gpus: Mapping[str, int] = field(default_factory=dict)
    """Accelerators by node; none on cores."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Of the generator, where they are not as it declares."""
    kinds: tuple[str, ...] = ()
    """Of accelerators, that alone are taken; empty: all that are there."""

    @property
    def setting(self) -> str:
        """What it has in common with those that deal the same devices out otherwise."""
        return repr((sorted(self.knobs.items()), self.kinds))

    def placed(self, graph: Graph) -> Graph:
        """The graph with these knobs; the one that is given stays as it is. GraphError where it refuses them."""
        if not self.knobs:
            return graph
        generator: Any = only(graph, Generate)
        return graph.swap(generator.name, dataclasses.replace(generator, **self.knobs))

    def on(self, devices: Devices) -> Devices:
        """The devices that are taken."""
        return Devices.of([each for each in devices.hosts if each.kind in self.kinds]) if self.kinds else devices

    def asked(self, graph: Graph, devices: Devices) -> str:
        """How one asks for it: flags, and knobs that are to be declared."""
        found = []
        if self.kinds:
            counts = {kind: sum(each.gpus for each in devices.hosts if each.kind == kind) for kind in self.kinds}
            found.append("--foresee " + "+".join(f"{count}x{kind}" for kind, count in counts.items()))
        for flag in ("gpus", "replicas", "ranks"):
            if wishes := getattr(self, flag):
                found.append(f"--{flag} " + ",".join(f"{node}={count}" for node, count in wishes.items()))
        if self.knobs:
            knobs = ", ".join(f"{knob}={value!r}" for knob, value in self.knobs.items())
            found.append(f"{type(only(graph, Generate)).__name__}({knobs})")
        return " ".join(found)


def candidates(graph: Graph, devices: Devices, *, knobs: bool = True, idle: bool = False) -> list[Candidate]:
    """Ways to place it on these devices, about a thousand at most.

    knobs: the generator's parallelism and precision are chosen too; else they are as it declares. idle: devices may be
    left unused."""
    if not devices.gpus:
        return _on_cores(graph, devices.cpus)
    names = list(dict.fromkeys(host.kind for host in devices.hosts if host.gpus))
    chosen: list[tuple[str, ...]] = [()]
    if knobs and len(names) > 1:
        chosen += [each for count in range(1, len(names)) for each in itertools.combinations(names, count)]
    found = []
    for kinds in chosen:
        there = Candidate(kinds=kinds).on(devices)
        found += _on_gpus(graph, there, kinds, knobs, idle, MOST // len(chosen))
    return found


def _on_gpus(
    graph: Graph, devices: Devices, kinds: tuple[str, ...], knobs: bool, idle: bool, most: int
) -> list[Candidate]:  # fmt: skip
    trainer, generator = only(graph, Learn), only(graph, Generate)
    others = {
        name: each.traits.tensor_parallel * each.traits.dp_replicate
        for name, each in graph.operators.items()
        if each.uses is not None and each not in (trainer, generator) and not each.light
    }
    free = devices.gpus - sum(others.values())
    ways = generators(generator, devices) if knobs else [{}]
    totals = range(2, free + 1) if idle and free <= 16 else sorted(
        {int(free * share) for share in (_SHARES if idle else (1.0,)) if free * share >= 2}, reverse=True
    )  # fmt: skip
    each_way = max(4, min(SPLITS, most // (len(ways) * max(1, len(totals))))) if knobs else SPLITS
    return [
        Candidate(
            gpus={generator.name: makes, trainer.name: total - makes, **others}, knobs=way, kinds=kinds
        )
        for way in ways for total in totals
        for makes in splits(
            total, way.get("tensor_parallel", generator.traits.tensor_parallel),
            trainer.traits.tensor_parallel * trainer.traits.dp_replicate, each_way,
        )
    ]  # fmt: skip


def generators(generator: Operator, devices: Devices) -> list[dict[str, Any]]:
    """Knobs of a generator that may differ from what it declares: ranks that share out its heads and stand on one host,
    fp8 where all devices multiply in it; the declared ones first."""
    fields = {each.name for each in dataclasses.fields(generator)}
    declared, widths = generator.traits.tensor_parallel, [1]
    assert generator.uses is not None, "a generator has a model"
    if "tensor_parallel" in fields:
        decoder = decoder_of(generator.uses.source)
        most = max((host.gpus for host in devices.hosts), default=devices.cpus)
        widths = [each for each in _PARALLEL if each <= most and deals_out(decoder.heads, decoder.kv_heads, each)]
    ways: list[dict[str, Any]] = [{}, *({"tensor_parallel": each} for each in widths if each != declared)]
    kinds: list[DeviceKind] = [device_kind(host.kind) for host in devices.hosts if host.gpus and host.kind]
    narrow = bool(kinds) and all("fp8" in kind.operations_per_s for kind in kinds)
    if narrow and getattr(generator, "weights", None) == "model" and generator.uses.dtype == "bfloat16":
        ways += [{**way, "weights": "fp8"} for way in ways]
    return ways


def deals_out(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether a model's heads can be dealt out to so many ranks; several may hold the same keys and values.

    >>> [ranks for ranks in (1, 2, 3, 4, 8) if deals_out(12, 2, ranks)]
    [1, 2, 4]
    """
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def splits(free: int, unit: int, trainer_unit: int, most: int) -> list[int]:
    """Devices of the generator, in whole replicas of so many; the trainer has the rest.

    >>> splits(8, 2, 1, 64)
    [2, 4, 6]
    """
    step = -(-free // most)
    step = step if step <= 4 else -(-step // 8) * 8  # whole hosts: a trainer has as many ranks on each
    step = -(-step // unit) * unit
    return [makes for makes in range(step, free, step) if (free - makes) % trainer_unit == 0]


def _on_cores(graph: Graph, cores: int) -> list[Candidate]:
    """Replicas and ranks, and ranks of each replica: as many as there are cores, at most."""
    trainer, generator = only(graph, Learn), only(graph, Generate)
    counts = _counts(cores)
    unit = trainer.traits.tensor_parallel * trainer.traits.dp_replicate
    return [
        Candidate(
            replicas={generator.name: replicas}, ranks={trainer.name: ranks}, knobs=way,
        )
        for way in generators(generator, Devices(cpus=cores))
        for replicas in counts if replicas * way.get("tensor_parallel", generator.traits.tensor_parallel) <= 2 * cores
        for ranks in counts if ranks % unit == 0
    ]  # fmt: skip


def _counts(most: int) -> Sequence[int]:
    return [each for each in (*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128) if each <= most]
