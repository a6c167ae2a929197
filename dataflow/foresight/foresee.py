"""What a graph will take on devices that nobody has rented yet: its plan, and the costs of each operator's share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import DeviceKind, device_kind
from dataflow.foresight.counts import Counts, counts_of, decoder_of
from dataflow.foresight.generation import Replica, generate, sustain
from dataflow.foresight.lengths import Lengths
from dataflow.foresight.parts import Parts
from dataflow.foresight.rates import ASSUMED, Rates
from dataflow.foresight.staleness import mean_staleness
from dataflow.foresight.steps import CONSTANTS, Steps, check_covered, steps_of
from dataflow.foresight.training import BACKWARD, Learners
from dataflow.node import Generate, Learn, Operator
from dataflow.planning.hosts import Devices
from dataflow.planning.model_size import ModelSize
from dataflow.planning.placement import Placement
from dataflow.planning.plan import Plan, plan
from dataflow.planning.sharing import Wishes
from dataflow.structure import Structure, group_size, sources_of

PROMPT_TOKENS, SIGMA = 200.0, 0.8
_CUT = 0.25
"""Mean length of completions over the most that they may have, where nobody says."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operator's share of a step."""

    node: str
    devices: str
    """For people: 8 x H100."""
    cut: str
    """How replicas and ranks share it out, for people."""
    count: int
    """Of its devices."""
    seconds: float
    """That its devices are busy for a step."""
    need_bytes: int | None
    """Of memory, of one rank, at least."""
    room_bytes: int
    at_once: float = 0.0
    """Rollouts that a generator decodes at once, on all its devices."""


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """What is foreseen of a graph."""

    operations: tuple[Operation, ...]
    step_s: float
    overlaps: bool
    """Whether generation and training go on at once."""
    weights_s: float
    """Of a version, from the trainer's ranks into the generators'; hidden where they overlap."""
    rollouts: float
    """Of a step."""
    staleness: float
    """Mean, in versions."""
    max_staleness: int
    gpus: int
    gpu_hours: float | None
    """Of all devices, for the steps asked for."""
    assumed: tuple[str, ...]
    """Sentences."""
    rates: Rates = field(repr=False, default=ASSUMED)

    @property
    def bottleneck(self) -> Operation:
        """Whoever is busy longest."""
        return max(self.operations, key=lambda each: each.seconds)

    def idle(self, operation: Operation) -> float:
        """Share of a step in which its devices wait."""
        return max(0.0, 1 - operation.seconds / self.step_s)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What nobody can know before a run."""

    prompt_tokens: float = PROMPT_TOKENS
    mean_tokens: float | None = None
    """Of a completion; None: a quarter of the most that it may have."""
    sigma: float = SIGMA


def foresee(
    graph: Structure, devices: Devices, *, gpus: Wishes, workload: Workload | None = None, steps: int | None = None,
    rates: Rates = ASSUMED, constants: str = CONSTANTS[0],
) -> Foreseen:  # fmt: skip
    """The plan on these devices, and what it takes: seconds of a step, who waits, memory, staleness.

    gpus: devices by node, as `plan` has them. constants: one of `steps.CONSTANTS`. GraphError where `check` or `plan`
    refuses, for a graph without generator and trainer on devices of their own, for a model whose config.json is not at
    hand, for devices of several kinds, for a generator that the constants do not cover."""
    kind, found = _kind(devices), workload or Workload()
    trainer, generator = _only(graph, Learn), _only(graph, Generate)
    if not isinstance(trainer, Learn) or trainer.uses is None or generator.uses is None:
        raise GraphError("what a step takes is told of a trainer and a generator with models; this graph has others")
    lengths = _lengths(generator, found)
    _check_forms(graph)
    decoder, dtype = decoder_of(generator.uses.source), generator.narrow or "bfloat16"
    check_covered(constants, decoder, kind, dtype)
    models = {source: counts_of(source) for source in _sources(graph)}
    made = plan(graph, devices, gpus=gpus, steps=steps, sizes={name: _size(each) for name, each in models.items()})
    if made.turns:
        raise GraphError("operators take turns on their devices here, which is not foreseen yet; give each its own")
    bound = next((each for each in graph.feedbacks if each.reader is generator), None)
    most = bound.max_staleness if bound is not None else 0
    sizes = [group_size(graph, source) for source in sources_of(graph, trainer.name)]
    group = max(filter(None, sizes), default=1)
    rollouts = float(trainer.step_prompts * group)
    made_by = steps_of(constants, decoder, kind, ranks=made.placements[generator.name].ranks, dtype=dtype)
    assumed: tuple[str, ...] = (
        f"rates: {rates.memory:.0%} of memory's and links' bandwidth, {rates.compute:.0%} of matrix products "
        f"({rates.source})",
        "products in bfloat16, but for a generator in fp8",
        f"prompts of {found.prompt_tokens:,.0f} tokens",
        f"completions of {lengths.mean:,.0f} tokens in the mean, of {generator.traits.max_tokens:,} at most, "
        f"log-normal with a sigma of {found.sigma:g}",
    )
    operations = []
    for name, operator in graph.operators.items():
        if operator.uses is not None and made.placements[name].gpus:
            operations.append(_operation(
                operator, made.placements[name], models[operator.uses.source], kind, rollouts, lengths, found, most,
                rates, made_by,
            ))  # fmt: skip
        elif operator.uses is not None and operator not in (trainer, generator):
            raise GraphError(
                f"'{name}' computes with a model and has no devices here; give it some by --gpus {name}=.."
            )
    weights = _exchange(made, generator, models[generator.uses.source], kind, rates)
    busy = {each.node: each.seconds for each in operations}
    if trainer.name not in busy or generator.name not in busy:
        raise GraphError(
            f"'{trainer.name}' and '{generator.name}' need devices to be foreseen on, but {sorted(busy)} have some; "
            f"give --gpus {generator.name}=..,{trainer.name}=.."
        )
    if made_by is not None:
        assumed = (f"'{generator.name}' by {made_by.source}", f"others' {assumed[0]}", *assumed[1:])
    step_s = max(busy.values()) if most else sum(busy.values()) + weights
    at_once = next(each.at_once for each in operations if each.node == generator.name)
    stale = 0.0
    if most:
        stale = min(float(most), mean_staleness(
            in_flight=min(at_once, (most + 1) * rollouts), batch=rollouts, tail=_tail(lengths, group),
            ratio=busy[trainer.name] / busy[generator.name],
        ))  # fmt: skip
    return Foreseen(
        operations=tuple(operations), step_s=step_s, overlaps=most > 0, weights_s=weights, rollouts=rollouts,
        staleness=stale, max_staleness=most, gpus=devices.gpus, assumed=assumed, rates=rates,
        gpu_hours=None if steps is None else steps * step_s * sum(each.count for each in operations) / 3600,
    )  # fmt: skip


def _check_forms(graph: Structure) -> None:
    """Refuse what the costs do not know."""
    for name, operator in graph.operators.items():
        form = "adapters" if operator.uses is not None and operator.uses.lora is not None else operator.narrow
        if form not in (None, "fp8"):
            raise GraphError(f"'{name}' has {form}, of which no cost is known yet; foresee it without")


def _lengths(generator: Operator, workload: Workload) -> Lengths:
    """Of completions. GraphError where they cannot be."""
    longest, mean = generator.traits.max_tokens, workload.mean_tokens
    if longest is None:
        raise GraphError(f"'{generator.name}' does not say how long completions may be; set its max_tokens")
    mean = max(1.0, _CUT * longest) if mean is None else mean
    if not 1 <= mean <= longest:
        raise GraphError(
            f"completions of '{generator.name}' are to have {mean:,.0f} tokens in the mean, but have {longest:,} at "
            f"most; foresee with fewer, or raise its max_tokens"
        )
    return Lengths.drawn(mean, longest, workload.sigma) if mean < longest else Lengths.of([mean])


def _operation(
    operator: Operator, placement: Placement, model: Counts, kind: DeviceKind, rollouts: float, lengths: Lengths,
    workload: Workload, max_staleness: int, rates: Rates, steps: Steps | None,
) -> Operation:  # fmt: skip
    made = Operation(
        node=operator.name, devices=f"{len(placement.gpus)} x {kind.name}", count=len(placement.gpus),
        cut=f"{placement.replicas} x {placement.ranks} rank{'s' if placement.ranks > 1 else ''}", seconds=0.0,
        need_bytes=placement.memory_bytes, room_bytes=kind.memory_bytes,
    )  # fmt: skip
    tokens = workload.prompt_tokens + lengths.mean
    learners = Learners(model=model, kind=kind, ranks=len(placement.gpus), tensor_parallel=placement.tensor_parallel)
    if isinstance(operator, Generate):
        replica = Replica(
            model=model, kind=kind, tensor_parallel=placement.ranks,
            dtype=operator.narrow or "bfloat16", steps=steps,
        )  # fmt: skip
        each, slots = rollouts / placement.replicas, operator.traits.slots
        limited = replace(rates, most_rollouts=slots)
        room = replica.at_once(workload.prompt_tokens + 0.6 * lengths.mean, limited)
        batch = min(room, (max_staleness + 1) * each)  # no more may be on their way
        parts = (
            sustain(replica, lengths, workload.prompt_tokens, each, limited, at_once=batch) if max_staleness
            else generate(replica, lengths, workload.prompt_tokens, each, limited)
        )  # fmt: skip
        return replace(made, seconds=parts.seconds(rates), at_once=batch * placement.replicas)
    forward = 1.0
    if operator.trains:
        forward += BACKWARD + operator.traits.gradient_checkpointing
    parts = learners.passes(rollouts, tokens, forward=forward, sequences=rollouts)
    return replace(made, seconds=parts.seconds(rates))


def _exchange(made: Plan, generator: Operator, model: Counts, kind: DeviceKind, rates: Rates) -> float:
    """Of a version, shard to shard: what a rank of a reader takes in, over the slowest link on its way."""
    ranks = made.placements[generator.name].ranks
    one_host = len({host for each in made.placements.values() for host in each.all_hosts}) <= 1
    link = kind.within_bytes_per_s if one_host else kind.between_bytes_per_s
    nbytes = model.parameters * (1 if generator.narrow else 2) / ranks
    return Parts(links=nbytes / link).seconds(rates)


def _tail(lengths: Lengths, group: int) -> float:
    """The longest of a group, in the mean, over the mean."""
    ends = ((lengths.tokens.searchsorted(lengths.tokens, side="right")) / len(lengths.tokens)) ** group
    weights = ends.copy()
    weights[1:] -= ends[:-1]
    return float((lengths.tokens * weights).sum() / weights.sum() / lengths.mean)


def _kind(devices: Devices) -> DeviceKind:
    kinds = list(dict.fromkeys(host.kind for host in devices.hosts if host.gpus))
    if len(kinds) != 1:
        raise GraphError(f"devices of one kind are foreseen for now, but there are {kinds or 'none'}; name one kind")
    return device_kind(kinds[0])


def _sources(graph: Structure) -> list[str]:
    return list(dict.fromkeys(each.uses.source for each in graph.operators.values() if each.uses is not None))


def _size(model: Counts) -> ModelSize:
    return ModelSize(
        parameters=model.parameters, largest_end=model.ends,
        linear=(("all together", model.attention + model.mlps + model.experts, 1),), layers=model.layers,
        width=model.width, cache_elements=model.cache, key_value_heads=model.cache_cuts,
    )  # fmt: skip


def _only(graph: Structure, kind: type[Operator]) -> Operator:
    found = [each for each in graph.operators.values() if isinstance(each, kind)]
    if len(found) != 1:
        raise GraphError(
            f"a graph with one generator and one trainer is foreseen for now, but this has {len(found)} "
            f"{'generators' if kind is Generate else 'trainers'}"
        )
    return found[0]


def splits(graph: Structure, devices: Devices) -> list[Mapping[str, int]]:
    """Some 64 ways to deal all devices out to trainer and generator, in whole replicas; other operators with models get
    one replica each."""
    trainer, generator = _only(graph, Learn), _only(graph, Generate)
    others = {
        name: each.traits.tensor_parallel * each.traits.dp_replicate
        for name, each in graph.operators.items()
        if each.uses is not None and each not in (trainer, generator) and not each.light
    }
    free = devices.gpus - sum(others.values())
    unit = generator.traits.tensor_parallel
    step = max(unit, -(-free // 64 // unit) * unit)
    return [
        {generator.name: makes, trainer.name: free - makes, **others}
        for makes in range(unit, free, step)
        if (free - makes) % (trainer.traits.tensor_parallel * trainer.traits.dp_replicate) == 0
    ]


def best_split(
    graph: Structure, devices: Devices, *, workload: Workload | None = None, steps: int | None = None,
    rates: Rates = ASSUMED, constants: str = CONSTANTS[0],
) -> tuple[Mapping[str, int], Foreseen]:  # fmt: skip
    """How all devices are dealt out for the shortest step. GraphError where no way fits: why the last did not."""
    found: list[tuple[float, int, Mapping[str, int], Foreseen]] = []
    why: GraphError | None = None
    for number, gpus in enumerate(splits(graph, devices)):
        try:
            made = foresee(graph, devices, gpus=gpus, workload=workload, steps=steps, rates=rates, constants=constants)
        except GraphError as error:
            why = error
            continue
        found.append((made.step_s, number, gpus, made))
    if not found:
        raise why or GraphError(f"{devices.gpus} devices are too few for a trainer and a generator; name more")
    _, _, gpus, made = min(found, key=lambda each: each[:2])
    return gpus, made
