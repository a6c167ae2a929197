"""What a graph will take on devices that nobody has rented yet: its plan, each operator's costs,
and a run by the clock under the engine's own rules.

Over 600 lines: it is the one way from a graph to its figures, read from top to bottom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import DeviceKind, device_kind
from dataflow.foresight.counts import counts_of, decoder_of, size_of
from dataflow.foresight.generation import GeneratorReplica, generate, prefill, sustain
from dataflow.foresight.lengths import mean_staleness
from dataflow.foresight.rates import ASSUMED_CONSTANTS, Constants, Parts
from dataflow.foresight.scenarios import (
    Foreground,
    Operation,
    between,
    episode_of,
    scenario_of,
    training_s,
)
from dataflow.foresight.simulation.scenario import Failures
from dataflow.foresight.simulation.simulate import Simulated, simulate
from dataflow.foresight.steps import check_covered
from dataflow.foresight.workload import Workload
from dataflow.node import Generate, Learn, Operator
from dataflow.planning.gpu_groups import Wishes
from dataflow.planning.hosts import Devices
from dataflow.planning.inputs import Place
from dataflow.planning.model_size import ModelSize
from dataflow.planning.placement import Placement
from dataflow.planning.plan import Plan, plan
from dataflow.scorer import Scorer
from dataflow.structure import Structure, group_size, sources_of

T = TypeVar("T", bound=Operator)

SIMULATED_STEPS = 60
"""Where nobody says how many; of a longer run so many are looked at."""
BRIEF_STEPS = 18
"""Steps of a simulation that only has to tell placements apart."""


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """What is foreseen of a graph."""

    operations: tuple[Operation, ...]
    step_s: float
    """Of a step, in the mean."""
    spread_s: tuple[float, float]
    """Which one step in ten is shorter than, and one in ten longer."""
    overlaps: bool
    """Whether generation and training go on at once."""
    in_turn: tuple[str, ...]
    """Nodes that take turns on the generator's devices; none where these are its own."""
    moved_s: float
    """Of a step: memory on its way to main memory and back."""
    weights_s: float
    """Of a version, from the trainer's ranks into the generators'; hidden where they overlap."""
    rollouts: float
    """Of a step."""
    staleness: float
    """Mean, in versions."""
    by_staleness: Mapping[int, float]
    """Share of trained rollouts whose oldest token is so many versions behind; empty: not
    simulated."""
    max_staleness: int
    in_flight: float | None
    """Groups without an outcome, in the mean; None: not simulated."""
    gpus: int
    gpu_hours: float | None
    """Of all devices, for the steps asked for."""
    assumed: tuple[str, ...]
    """Sentences."""
    constants: Constants = field(repr=False, default=ASSUMED_CONSTANTS)
    simulated: Simulated | None = field(repr=False, default=None, compare=False)

    @property
    def bottleneck(self) -> Operation:
        """The operator that is busy longest."""
        return max(self.operations, key=lambda each: each.seconds)

    @property
    def taken(self) -> dict[str, int]:
        """Accelerators that any operator has, by kind; those that several have in turn count
        once.
        """
        shared = [operation for operation in self.operations if operation.node in self.in_turn]
        own = [operation for operation in self.operations if operation.node not in self.in_turn]
        return dict(
            sum((Counter(operation.kinds) for operation in (*own, *shared[:1])), Counter[str]())
        )

    @property
    def efficiency(self) -> float:
        """Share of a step in which what bounds it is at work, as a run's summary has it: operators
        that one worker has are at work one after the other.
        """
        busy: Counter[tuple[str, str]] = Counter()
        for operation in self.operations:
            node = self.in_turn[0] if operation.node in self.in_turn else operation.node
            busy[operation.worker, "" if operation.worker else node] += operation.seconds  # type: ignore[assignment]
        return min(1.0, max(busy.values()) / self.step_s)

    def idle(self, operation: Operation) -> float:
        """Share of a step in which it waits."""
        return max(0.0, 1 - operation.seconds / self.step_s)


def foresee(
    graph: Structure,
    devices: Devices,
    *,
    gpus: Wishes | None = None,
    replicas: Mapping[str, int] | None = None,
    ranks: Mapping[str, int] | None = None,
    workload: Workload | None = None,
    steps: int | None = None,
    constants: Constants = ASSUMED_CONSTANTS,
    failures: Failures | None = None,
    simulated: bool = True,
    place: Place | None = None,
    brief: bool = False,
) -> Foreseen:
    """The plan on these devices, and what it takes: seconds of a step, who waits, memory,
    staleness.

    gpus, replicas, ranks, place: as `plan` has them; devices without accelerators compute on their
    cores. simulated: by a run of the graph by the clock; else by closed forms, in a hundredth of
    the time, which know no tails, no credit, and nothing of cores that are shared. brief: simulate
    few steps, to tell placements apart. GraphError where `check` or `plan` refuses, for a graph
    without one generator and one trainer, for a model whose config.json is not at hand.
    """
    ground = ground_of(
        graph,
        devices,
        gpus=gpus,
        replicas=replicas,
        ranks=ranks,
        place=place,
        workload=workload,
        steps=steps,
        constants=constants,
    )
    return foreseen_on(ground, steps=steps, failures=failures, simulated=simulated, brief=brief)


def foreseen_on(
    ground: Foreground,
    *,
    steps: int | None = None,
    failures: Failures | None = None,
    simulated: bool = True,
    brief: bool = False,
) -> Foreseen:
    """As `foresee`, of a graph that is planned already. GraphError where its costs are not
    known.
    """
    devices = ground.plan.devices
    rollouts = float(ground.trainer.step_prompts * ground.group_size)
    foreseen = Foreseen(
        operations=tuple(_closed(ground)),
        step_s=0.0,
        spread_s=(0.0, 0.0),
        overlaps=ground.max_staleness > 0 and not ground.in_turn,
        in_turn=ground.in_turn,
        moved_s=ground.moments_s + sum(ground.moves_s.values()) / (ground.max_staleness + 1),
        weights_s=ground.weights_s,
        rollouts=rollouts,
        staleness=0.0,
        by_staleness={},
        in_flight=None,
        max_staleness=ground.max_staleness,
        gpus=devices.gpus,
        gpu_hours=None,
        assumed=(),
        constants=ground.constants,
    )
    foreseen = (
        _by_simulation(foreseen, ground, steps, failures, brief)
        if simulated
        else _by_closed_forms(foreseen, ground)
    )
    # measured steps know by now what was asked of them
    foreseen = replace(foreseen, assumed=_assumed(ground))
    if steps is None or not devices.gpus:
        return foreseen
    return replace(
        foreseen, gpu_hours=steps * foreseen.step_s * sum(foreseen.taken.values()) / 3600
    )


def ground_of(
    graph: Structure,
    devices: Devices,
    *,
    gpus: Wishes | None = None,
    replicas: Mapping[str, int] | None = None,
    ranks: Mapping[str, int] | None = None,
    place: Place | None = None,
    workload: Workload | None = None,
    steps: int | None = None,
    constants: Constants = ASSUMED_CONSTANTS,
) -> Foreground:
    """The graph planned on these devices, as its costs are counted. GraphError as `foresee`."""
    workload = workload or Workload()
    trainer, generator = only(graph, Learn), only(graph, Generate)
    if trainer.uses is None or generator.uses is None:
        raise GraphError(
            "what a step takes is told of a trainer and a generator with models; this graph has"
            " others"
        )
    workload.check(graph)
    episode = episode_of(graph, workload)
    lengths = workload.lengths(
        generator, round(workload.turns[episode.name]) if episode is not None else 1
    )
    _check_forms(graph)
    sources = dict.fromkeys(
        operator.uses.source for operator in graph.operators.values() if operator.uses is not None
    )
    models = {source: counts_of(source) for source in sources}
    measured_sizes = {source: size_of(source) for source in sources}
    kinds = _kinds(devices)
    for kind in dict.fromkeys(kinds.values()):
        dtype = generator.quantized or ("float32" if kind.name == "cpu" else "bfloat16")
        check_covered(constants.decode, decoder_of(generator.uses.source), kind, dtype)
    placed = plan(
        graph,
        devices,
        gpus=gpus,
        replicas=replicas,
        ranks=ranks,
        steps=steps,
        place=place,
        sizes=measured_sizes,
    )
    if placed.turns and (
        not devices.gpus
        or not {generator.name, trainer.name} <= set(placed.turns_of(generator.name))
    ):
        raise GraphError(
            f"operators take turns on {'accelerators' if devices.gpus else 'cores'} here,"
            f" {' and '.join(map(str, placed.turns))}, which is foreseen of generator and trainer"
            " on"
            " the same accelerators alone; give --gpus"
            f" {generator.name}=N,{trainer.name}={generator.name}, or each its own"
        )
    lacking = [
        operator.name
        for operator in (generator, trainer)
        if devices.gpus and not placed.placements[operator.name].gpus
    ]
    if lacking:
        raise GraphError(
            f"'{trainer.name}' and '{generator.name}' need devices to be foreseen on, but {lacking}"
            f" have none; give --gpus {generator.name}=..,{trainer.name}=.."
        )
    for name, operator in graph.operators.items():
        if operator.uses is not None and devices.gpus and not placed.placements[name].gpus:
            raise GraphError(
                f"'{name}' computes with a model and has no devices here; give it some by --gpus"
                f" {name}=.."
            )
    trainer = replace(trainer, **placed.placements[trainer.name].chosen)
    bound = next((feedback for feedback in graph.feedbacks if feedback.reader is generator), None)
    sizes = [group_size(graph, source) for source in sources_of(graph, trainer.name)]
    return Foreground(
        graph=graph,
        plan=placed,
        generator=generator,
        trainer=trainer,
        models=models,
        sizes=measured_sizes,
        kinds=kinds,
        lengths=lengths,
        episode=episode,
        workload=workload,
        constants=constants,
        group_size=max(filter(None, sizes), default=1),
        max_staleness=bound.max_staleness if bound is not None else 0,
        weights_s=_exchange(
            placed, generator, measured_sizes[generator.uses.source], kinds, constants
        ),
    )


def _by_simulation(
    foreseen: Foreseen,
    ground: Foreground,
    steps: int | None,
    failures: Failures | None,
    brief: bool,
) -> Foreseen:
    most = BRIEF_STEPS if brief else SIMULATED_STEPS
    looked_at = min(steps or most, max(most, (4 if brief else 6) * (ground.max_staleness + 2)))
    simulated = simulate(scenario_of(ground, steps=max(3, looked_at), failures=failures))
    shares = {ground.generator.name: "generator", ground.trainer.name: "trainer"}
    operations = tuple(
        (
            operation
            if operation.waits  # as many of its calls are open in the mean as its closed form has
            else replace(
                operation,
                seconds=simulated.busy[shares.get(operation.node, operation.node)]
                * simulated.step_s,
            )
        )
        for operation in foreseen.operations
    )
    low, high = np.percentile(simulated.steps_s, [10, 90])
    return replace(
        foreseen,
        operations=operations,
        step_s=simulated.step_s,
        spread_s=(float(low), float(high)),
        staleness=simulated.mean_staleness,
        by_staleness=_shares(simulated.staleness),
        in_flight=simulated.in_flight,
        simulated=simulated,
    )


def _by_closed_forms(foreseen: Foreseen, ground: Foreground) -> Foreseen:
    """The longest operator where they overlap, their sum where they do not; staleness by Applied
    Compute's form.
    """
    busy = {operation.node: operation.seconds for operation in foreseen.operations}
    most, rollouts = ground.max_staleness, foreseen.rollouts
    if ground.in_turn:
        return _in_turn(foreseen, ground)
    step_s = max(busy.values()) if most else sum(busy.values()) + ground.weights_s
    step_s += 0.0 if most else (ground.turns - 1) * ground.world_s
    stale = 0.0
    if most:
        at_once = next(
            operation.at_once
            for operation in foreseen.operations
            if operation.node == ground.generator.name
        )
        stale = min(
            float(most),
            mean_staleness(
                in_flight=min(at_once, (most + 1) * rollouts),
                batch=rollouts,
                tail=ground.lengths.tail(ground.group_size),
                ratio=busy[ground.trainer.name] / busy[ground.generator.name],
            ),
        )
    return replace(foreseen, step_s=step_s, spread_s=(step_s, step_s), staleness=stale)


def _in_turn(foreseen: Foreseen, ground: Foreground) -> Foreseen:
    """The sum over operators that share devices, plus moving their memory once for as many steps as
    may be ahead; operators with their own devices work meanwhile.
    """
    ahead = ground.max_staleness
    shared = sum(
        operation.seconds for operation in foreseen.operations if operation.node in ground.in_turn
    )
    shared += ground.weights_s + sum(ground.moves_s.values()) / (ahead + 1)
    apart_s = [
        operation.seconds
        for operation in foreseen.operations
        if operation.node not in ground.in_turn
    ]
    step_s = max([shared, *apart_s]) if ahead else shared + sum(apart_s)
    return replace(foreseen, step_s=step_s, spread_s=(step_s, step_s), staleness=ahead / 2)


def _shares(counts: Counter[int]) -> dict[int, float]:
    total = counts.total()
    return {versions: count / total for versions, count in sorted(counts.items())}


def _check_forms(graph: Structure) -> None:
    """Refuse what the costs do not know."""
    for name, operator in graph.operators.items():
        form = operator.quantized
        if form not in (None, "fp8"):
            raise GraphError(
                f"'{name}' has {form}, of which no cost is known yet; foresee it without"
            )


def _assumed(ground: Foreground) -> tuple[str, ...]:
    constants, workload, lengths = ground.constants, ground.workload, ground.lengths
    measured = [
        f"'{ground.generator.name}' by {steps.source}"
        for steps in ground.measured.values()
        if steps is not None
    ]
    whose_rates = "others' " if measured else ""
    assumptions = [
        *measured,
        (
            f"{whose_rates}rates: {constants.generator.memory:.0%} of memory's and links'"
            " bandwidth, "
            f"{constants.generator.compute:.0%} of matrix products ({constants.source})"
            if constants.source == ASSUMED_CONSTANTS.source
            else f"rates: {constants.source}"
        ),
        f"products in {ground.dtype}, but for a generator in fp8",
        *_float32(ground),
        f"prompts of {workload.prompt_tokens:,.0f} tokens",
        f"completions of {lengths.mean:,.0f} tokens in the mean, of"
        f" {ground.generator.traits.sampling.max_tokens:,} at most, "
        + (
            "as a run had them"
            if workload.run_lengths is not None
            else f"log-normal with a sigma of {workload.sigma:g}"
        ),
    ]
    assumptions += [
        f"'{node}' cut over"
        f" {' and '.join(f'{many} ranks by {name}' for name, many in cut.items())}, which this"
        " engine does not run; memory as without"
        for node, cut in workload.cuts.items()
    ]
    if (episode := ground.episode) is not None:
        assumptions.append(
            f"rollouts of '{episode.name}' in {ground.turns} turns of like length, between which"
            f" the world takes {ground.world_s:g} s; what it says costs nothing"
        )
    free = [
        operator.name
        for operator in between(ground.graph, ground.maker, ground.trainer)
        if operator.uses is None and ground.row_s(operator.name) is None
    ]
    if free:
        assumptions.append(
            f"no time for {', '.join(free)} (--workload {free[0]}.seconds=.. says otherwise)"
        )
    return tuple(assumptions)


def _float32(ground: Foreground) -> list[str]:
    """How operators in float32 on accelerators are foreseen, in a sentence."""
    wide = [
        name
        for name, operator in ground.graph.operators.items()
        if operator.uses is not None and operator.uses.dtype == "float32"
    ]
    if ground.on_cpu or not wide:
        return []
    return [
        f"{', '.join(wide)} compute in float32, which takes longer than foreseen; give"
        " dtype='bfloat16'"
    ]


def _closed(ground: Foreground) -> list[Operation]:
    """Each operator's share, by closed forms."""
    operations = []
    for name, operator in ground.graph.operators.items():
        placement = ground.plan.placements[name]
        if operator.uses is not None and (placement.gpus or ground.on_cpu):
            operations.append(_operation(operator, placement, ground))
    names = {operation.node for operation in operations}
    rollouts = float(ground.trainer.step_prompts * ground.group_size)
    for scorer in between(ground.graph, ground.maker, ground.trainer):
        if scorer.name not in names and (row_s := ground.row_s(scorer.name) or 0.0) > 0:
            operations.append(
                Operation(
                    node=scorer.name,
                    devices="cpu",
                    cut="1 x 1 rank",
                    count=0,
                    need=None,
                    room_bytes=None,
                    seconds=rollouts * row_s / scorer.traits.capacity.calls_at_once,
                    waits=scorer.traits.capacity.calls_at_once > 1,
                    worker=(
                        ""
                        if isinstance(scorer, Scorer) and scorer.isolate
                        else ground.plan.placements[scorer.name].worker
                    ),
                )
            )
    return operations


def _operation(operator: Operator, placement: Placement, ground: Foreground) -> Operation:
    workload, count = ground.workload, ground.ranks(operator.name)
    kinds = _kinds_of(placement, ground)
    room = (
        min(kind.memory_bytes for kind in kinds)
        if placement.gpus
        else ground.plan.devices.memory_bytes or None
    )
    operation = Operation(
        node=operator.name,
        devices=" + ".join(f"{many} x {kind.name}" for kind, many in kinds.items()),
        count=count,
        cut=_cut(operator, placement, ground),
        seconds=0.0,
        need=placement.need,
        room_bytes=room,
        kinds={kind.name: many for kind, many in kinds.items()} if placement.gpus else {},
        choice=placement.choice,
    )
    rollouts = float(ground.trainer.step_prompts * ground.group_size)
    tokens = workload.prompt_tokens + ground.lengths.mean
    if operator is ground.generator:
        alike = Counter(ground.replica(number) for number in range(ground.replicas))
        costs = {
            replica: _generation(replica, rollouts / ground.replicas, ground, of=rollouts)
            for replica in alike
        }
        # shares that they make in a second
        pace = sum(many / costs[replica][0] for replica, many in alike.items())
        at_once = sum(many * costs[replica][1] for replica, many in alike.items())
        return replace(operation, seconds=ground.replicas / pace, at_once=at_once)
    if operator.trains:
        return replace(operation, seconds=sum(training_s(ground)))
    parts = ground.learners(operator).passes(rollouts, tokens, forward=1.0, sequences=rollouts)
    return replace(operation, seconds=parts.seconds(ground.rates(operator)))


def _cut(operator: Operator, placement: Placement, ground: Foreground) -> str:
    stages = ground.cut(operator.name, "pipeline") if operator is ground.generator else 1
    ranks = placement.ranks * stages
    return f"{placement.replicas // stages} x {ranks} rank{'s' if ranks > 1 else ''}"


def _generation(
    replica: GeneratorReplica, rollouts: float, ground: Foreground, of: float
) -> tuple[float, float]:
    """Seconds in which a replica makes so many, of those that all make, and how many it decodes at
    once.
    """
    rates, prompt = ground.rates(ground.generator), ground.workload.prompt_tokens
    slots = float(ground.generator.traits.capacity.slots)
    limited = replace(rates, most_rollouts=ground.generator.traits.capacity.slots)
    room = slots if ground.on_cpu else replica.at_once(prompt + 0.6 * ground.lengths.mean, limited)
    batch = min(room, (ground.max_staleness + 1) * rollouts)  # no more may be on their way
    parts = (
        sustain(replica, ground.lengths, prompt, rollouts, limited, at_once=batch)
        if ground.max_staleness
        else generate(replica, ground.lengths, prompt, rollouts, limited, of=of)
    )
    # siblings have one prompt
    shared = prefill(replica, prompt, rollouts * (1 - 1 / ground.group_size))
    return (parts + shared * -1).seconds(rates) + rollouts * rates.end_s, batch


def _kinds_of(placement: Placement, ground: Foreground) -> Counter[DeviceKind]:
    """How many devices of which kind an operator has."""
    if ground.on_cpu:
        return Counter({ground.kinds[""]: placement.replicas * placement.ranks})
    hosts = placement.rank_hosts or [
        host for host in placement.hosts for _ in range(placement.ranks)
    ]
    return Counter(ground.kinds[host] for host in hosts)


def _exchange(
    placed: Plan,
    generator: Operator,
    size: ModelSize,
    kinds: Mapping[str, DeviceKind],
    constants: Constants,
) -> float:
    """Of a version, shard to shard: what a rank of a reader takes in, over the slowest link on its
    way; what it copies from main memory, where it takes it in there; and what it merges of adapters
    into its weights, which it reads and writes.
    """
    model, ranks = generator.uses, placed.placements[generator.name].ranks
    assert model is not None, "a generator has a model"
    one_host = (
        len({host for placement in placed.placements.values() for host in placement.all_hosts}) <= 1
    )
    bandwidth = min(kind.memory_bytes_per_s for kind in kinds.values())
    link = min(
        kind.within_bytes_per_s if one_host else kind.between_bytes_per_s for kind in kinds.values()
    )
    if placed.turns_of(generator.name):
        link = bandwidth / 2  # read and written within a device
    nbytes = size.sent_bytes("bfloat16", model.lora, ranks) // (2 if generator.quantized else 1)
    merged = 0 if model.lora is None else 3 * 2 * size.linear_numbers / ranks
    copied_s = 0.0
    if placed.placements[generator.name].arrives_in_host:
        host = min(kind.host_bytes_per_s for kind in kinds.values())
        link, copied_s = min(link, host), nbytes / host
    return Parts(links=nbytes / link + copied_s, memory=merged / bandwidth).seconds(
        constants.generator
    )


def _kinds(devices: Devices) -> dict[str, DeviceKind]:
    """By host that has accelerators; without any, this machine's cores."""
    if not devices.gpus:
        return {"": replace(device_kind("cpu"), memory_bytes=devices.memory_bytes or 1 << 40)}
    kinds = {host.name: device_kind(host.kind) for host in devices.hosts if host.gpus}
    if not kinds:
        raise GraphError(
            f"{devices.gpus} accelerators of no kind cannot be foreseen; name hosts and kinds, as"
            " in 16xH100"
        )
    return kinds


def only(graph: Structure, kind: type[T]) -> T:
    """The generator, or the trainer. GraphError where there is not one."""
    operators = [
        operator
        for operator in graph.operators.values()
        if isinstance(operator, kind)
        and not (isinstance(operator, Generate) and operator.asks is not None)
    ]
    if len(operators) != 1:
        raise GraphError(
            "a graph with one generator and one trainer is foreseen for now, but this has"
            f" {len(operators)} {'generators' if kind is Generate else 'trainers'}"
        )
    return operators[0]
