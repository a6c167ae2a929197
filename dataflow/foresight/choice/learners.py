"""How a trainer's ranks share its model out: the way that fits into their memory and takes the
least time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.foresight.catalogue import device_kind
from dataflow.foresight.counts import counts_of, decoder_of
from dataflow.foresight.foresee import size_of
from dataflow.foresight.rates import Rates
from dataflow.foresight.sharding import waits_s
from dataflow.foresight.training import Learners
from dataflow.foresight.workload import Workload
from dataflow.graph import Graph
from dataflow.node import Learn, Operator
from dataflow.planning.hosts import Host
from dataflow.planning.memory_need import need_of
from dataflow.structure import group_size, sources_of

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
    stand on one host, copies of the model, a power of two; the declared ones first, then those that
    cut and copy least."""
    fields = {each.name for each in dataclasses.fields(trainer)}
    if trainer.uses is None or not {"tensor_parallel", "dp_replicate"} <= fields:
        return [{}]
    decoder, there = decoder_of(trainer.uses.source), sum(host.gpus for host in hosts)
    most = max((host.gpus for host in hosts), default=1)
    widths = [
        each
        for each in PARALLEL
        if each <= most and deals_out(decoder.heads, decoder.kv_heads, each)
    ]
    copies = [1 << power for power in range(there.bit_length())]
    traits = trainer.traits
    ways = [
        {"tensor_parallel": width, "dp_replicate": count}
        for width in widths
        for count in copies
        if width * count <= there
        and (width, count) != (traits.tensor_parallel, traits.dp_replicate)
    ]
    declared = {"tensor_parallel": traits.tensor_parallel, "dp_replicate": traits.dp_replicate}
    return [
        {},
        *({knob: size for knob, size in way.items() if size != declared[knob]} for way in ways),
    ]


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
    """As graph and workload have it."""
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
    fits; of equals the first. The first one where none fits: `plan` says why.

    hosts: on which they are; of unlike ones the slowest and the smallest count."""
    if len(ways) == 1:
        return ways[0]
    assert trainer.uses is not None, "one whose knobs are tried has a model"
    kind = min((device_kind(host.kind) for host in hosts), key=lambda each: each.rate("bfloat16"))
    room = min(host.gpu_memory_bytes for host in hosts)
    model, best, least = counts_of(trainer.uses.source), ways[0], float("inf")
    size = size_of(trainer.uses.source)
    for way in ways:
        made: Any = dataclasses.replace(trainer, **way)
        traits = made.traits
        if ranks % (traits.tensor_parallel * traits.dp_replicate):
            continue
        need = need_of(graph, made, size, ranks, on_gpu=True)
        if need is not None and need.total > room:
            continue
        taken = Learners(
            model=model, kind=kind, ranks=ranks, tensor_parallel=traits.tensor_parallel
        )
        forward = taken.forward + traits.gradient_checkpointing
        passes = taken.passes(
            step.rollouts, step.tokens, forward=forward, sequences=step.rollouts
        ).seconds(step.rates)
        seconds = passes + waits_s(
            taken,
            traits.dp_replicate,
            step.rates,
            tokens=step.rollouts * step.tokens,
            at_once=traits.micro_batch_tokens,
            computing_s=passes,
        )
        if seconds < least * (1 - 1e-9):
            best, least = way, seconds
    return best
