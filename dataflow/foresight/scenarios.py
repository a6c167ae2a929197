"""A planned graph as its costs are counted: by closed forms, operator by operator, and as the
simulation takes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import networkx as nx
import numpy as np

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import DeviceKind
from dataflow.foresight.counts import Counts, decoder_of
from dataflow.foresight.generation import GeneratorReplica, prefill
from dataflow.foresight.lengths import Lengths
from dataflow.foresight.links import PER_LEARNT_LAYER
from dataflow.foresight.rates import Constants, Parts, Rates
from dataflow.foresight.simulation.clock import Processors
from dataflow.foresight.simulation.scenario import (
    Failures,
    GeneratorCosts,
    Scenario,
    ScorerCosts,
    TrainerCosts,
    coarse,
)
from dataflow.foresight.steps import ReplicaTimes, steps_of
from dataflow.foresight.training import LAST, STATE_BYTES, Learners, waits_s
from dataflow.foresight.workload import CUTS, Workload
from dataflow.node import Generate, Learn, Operator
from dataflow.planning.gpu_groups import Group
from dataflow.planning.model_size import ModelSize, bytes_of
from dataflow.planning.placement import Need
from dataflow.planning.plan import Plan
from dataflow.planning.wiring import edges
from dataflow.rules import begins_early
from dataflow.structure import Structure, episodes_of

_COUNTED = ("weights", "KV-cache", "a forward pass", "captured steps")
"""Of a generator's need, what its rates count, the last two in the share that no cache takes."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operator's share of a step."""

    node: str
    devices: str
    """For people: 8 x H100."""
    cut: str
    """Replicas and ranks, as text."""
    count: int
    """Of its devices."""
    seconds: float
    """Seconds that each replica is busy per step, in the mean."""
    need: Need | None
    """Memory of one rank, at least."""
    room_bytes: int | None
    choice: str = ""
    """As `Placement.choice`."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Its accelerators, by kind."""
    at_once: float = 0.0
    """Rollouts that a generator decodes at once at most, on all its devices."""
    waits: bool = False
    """Whether it waits for something elsewhere, and computes nothing meanwhile."""
    worker: str = ""
    """The worker that it shares with others; empty: it has its own processes."""

    @property
    def need_bytes(self) -> int | None:
        """Of memory, of one rank, at least."""
        return None if self.need is None else self.need.total


@dataclass(frozen=True, kw_only=True)
class Foreground:
    """What all costs of one question have in common."""

    graph: Structure
    plan: Plan
    generator: Operator
    trainer: Learn
    models: Mapping[str, Counts]
    sizes: Mapping[str, ModelSize]
    """As memory is counted."""
    kinds: Mapping[str, DeviceKind]
    """By host; that of this machine's cores by an empty name."""
    lengths: Lengths
    workload: Workload
    constants: Constants
    group_size: int
    max_staleness: int
    weights_s: float
    """Seconds for a version to arrive."""
    episode: Generate | None = None
    """The operator that makes rollouts of the generator's turns; None: the generator itself."""
    measured: dict[tuple[DeviceKind, int, str], ReplicaTimes | None] = field(default_factory=dict)
    """A generator's step times, by devices, ranks and dtype; each knows what it was asked for."""

    @property
    def maker(self) -> Operator:
        """The operator that takes prompts, and makes rollouts of them."""
        return self.episode or self.generator

    def called(self, name: str) -> str:
        """The name of a node in the simulation."""
        return {self.generator.name: "generator", self.trainer.name: "trainer"}.get(name, name)

    @property
    def turns(self) -> int:
        """Turns of the policy in a rollout."""
        return 1 if self.episode is None else round(self.workload.turns[self.episode.name])

    @property
    def world_s(self) -> float:
        """Seconds between two turns."""
        return 0.0 if self.episode is None else self.workload.world_s.get(self.episode.name, 0.0)

    @property
    def on_cpu(self) -> bool:
        """Whether models compute on the host's own cores."""
        return "" in self.kinds

    def kind(self, node: str, replica: int = 0) -> DeviceKind:
        """Of the devices of one replica; of ranks on unlike ones, which wait for each other, the
        slowest.
        """
        if self.on_cpu:
            return self.kinds[""]
        placement = self.plan.placements[node]
        hosts = placement.rank_hosts or placement.hosts[replica : replica + 1]
        return min((self.kinds[host] for host in hosts), key=lambda kind: kind.rate(self.dtype))

    @property
    def computed(self) -> float:
        """Tokens that a trainer passes over, of all tokens."""
        share = self.workload.computed
        return self.constants.computed if share is None else share

    @property
    def trained_tokens(self) -> float:
        """Tokens of a rollout that a trainer may pass over: with its share of the group's prompt,
        without the last token.
        """
        return self.lengths.mean - LAST + self.workload.prompt_tokens / self.group_size

    def row_s(self, name: str) -> float | None:
        """Seconds of a row of an operator that needs no model; None: unknown."""
        row_s, constants = self.workload.row_s.get(name), self.constants
        if row_s is not None or name not in constants.row_s:
            return row_s
        return constants.row_s[name] + constants.row_token_s.get(name, 0.0) * self.lengths.mean

    def rates(self, operator: Operator) -> Rates:
        """Rates of an operator with a model; on cores, with its processes' threads."""
        role: Literal["generator", "learner"] = (
            "generator" if operator is self.generator else "learner"
        )
        return self.constants.of(
            role, self.plan.placements[operator.name].threads if self.on_cpu else 1
        )

    @property
    def dtype(self) -> str:
        """Dtype of products, where no operator says another."""
        return "float32" if self.on_cpu else "bfloat16"

    def ranks(self, node: str) -> int:
        """Devices, or processes, of all its replicas."""
        placement = self.plan.placements[node]
        return len(placement.gpus) or placement.replicas * placement.ranks

    def cut(self, node: str, name: str) -> int:
        """Over how many ranks an operator's model is supposed to be cut in this way; 1 where nobody
        says.
        """
        return self.workload.cuts.get(node, {}).get(name, 1)

    @property
    def replicas(self) -> int:
        """Of the generator; a supposed pipeline makes one of several. GraphError where it
        cannot.
        """
        name = self.generator.name
        count, stages = self.plan.placements[name].replicas, self.cut(name, "pipeline")
        if count % stages:
            raise GraphError(
                f"'{name}' has {count} replicas here, which make no pipelines of {stages}; suppose"
                " shorter ones, or give it more devices"
            )
        return count // stages

    def replica(self, number: int = 0) -> GeneratorReplica:
        """One of the generator's."""
        operator, placement = self.generator, self.plan.placements[self.generator.name]
        assert operator.uses is not None, "a generator has a model"
        stages = self.cut(operator.name, "pipeline")
        kind, dtype = self.kind(operator.name, number * stages), operator.quantized or self.dtype
        way = (kind, placement.ranks, dtype)
        if way not in self.measured:
            decoder = decoder_of(operator.uses.source)
            self.measured[way] = steps_of(
                self.constants.decode, decoder, kind, ranks=placement.ranks, dtype=dtype
            )
        return GeneratorReplica(
            model=self.models[operator.uses.source],
            kind=kind,
            tensor_parallel=placement.ranks,
            dtype=dtype,
            pipeline_parallel=stages,
            steps=self.measured[way],
            reserved_bytes=self.reserved_bytes(operator),
        )

    def reserved_bytes(self, operator: Operator) -> float:
        """Bytes on one replica's devices that neither weights nor cache use: layers that adapters
        are merged into, and a version that arrives.
        """
        need = self.plan.placements[operator.name].need
        if need is None or self.on_cpu:
            return 0.0
        other_bytes = sum(part for name, part in need.parts.items() if name not in _COUNTED)
        return float(other_bytes * self.plan.placements[operator.name].ranks)

    @property
    def in_turn(self) -> Group:
        """The nodes that take turns on the generator's devices; none where these are its own."""
        return self.plan.turns_of(self.generator.name)

    @property
    def moves_s(self) -> Mapping[str, float]:
        """By node that takes turns, seconds in which its memory comes from main memory and goes
        there, once a turn.
        """
        return {name: self._moved_s(self.graph.operators[name]) for name in self.in_turn}

    @property
    def moments_s(self) -> float:
        """Of a step: the optimiser's state comes for the update, and goes, where the devices are
        others' besides.
        """
        trainer = self.trainer
        if self.on_cpu or not (self.in_turn or trainer.traits.training.offloads):
            return 0.0
        learners = self.learners(trainer)
        return self._to_host(2 * (STATE_BYTES - 4) * learners.trained / learners.ranks, trainer)

    def _moved_s(self, operator: Operator) -> float:
        model = operator.uses
        if model is None or (operator is self.generator and model.lora is None):
            return 0.0  # its weights come again from the trainer's
        size, shares = self.sizes[model.source], self.ranks(operator.name)
        parts = size.parts(model.dtype, operator.trains, model.lora)
        kept_bytes = sum(
            part for name, part in parts.items() if name not in ("gradients", "optimiser")
        )
        return self._to_host(2 * kept_bytes / shares, operator)

    def _to_host(self, nbytes: float, operator: Operator) -> float:
        kind = self.kind(operator.name)
        return Parts(links=nbytes / kind.host_bytes_per_s).seconds(self.rates(operator))

    def learners(self, operator: Operator) -> Learners:
        """The ranks of a trainer, or of an operator that computes log-probabilities."""
        assert operator.uses is not None, "one that computes with a model"
        ranks, tensor_parallel = (
            self.ranks(operator.name),
            self.plan.placements[operator.name].split.tensor_parallel,
        )
        pipeline, context, expert = (self.cut(operator.name, cut) for cut in CUTS)
        if ranks % (tensor_parallel * pipeline * context) or ranks % expert:
            raise GraphError(
                f"'{operator.name}' has {ranks} ranks, which cannot be cut {tensor_parallel} ways"
                f" by tensors, {pipeline} by pipeline, {context} by context and {expert} by expert;"
                " suppose divisors, or give it other devices"
            )
        return Learners(
            model=self.models[operator.uses.source],
            kind=self.kind(operator.name),
            ranks=ranks,
            dtype=self.dtype,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline,
            context_parallel=context,
            expert_parallel=expert,
            adapters=self._adapters(operator),
        )

    def _adapters(self, operator: Operator) -> float:
        model = operator.uses
        if model is None or model.lora is None:
            return 0.0
        return self.sizes[model.source].sent_bytes(model.dtype, model.lora) / bytes_of(model.dtype)

    def waits_s(self, learners: Learners, computing_s: float, tokens: float) -> float:
        """Of a step of so many tokens: how long the trainer's ranks wait for each other's shards.
        Cores exchange them too, but what this takes is in constants that were fitted to such
        runs.
        """
        if self.on_cpu:
            return 0.0
        traits = self.trainer.traits
        return waits_s(
            learners,
            traits.split.dp_replicate,
            self.constants.learner,
            tokens=self.computed * tokens,
            at_once=traits.training.micro_batch_tokens,
            computing_s=computing_s,
        )


def scenario_of(ground: Foreground, *, steps: int, failures: Failures | None = None) -> Scenario:
    """The graph's bounds, the plan's sizes, and each operator's seconds."""
    graph, plan, trainer, constants = ground.graph, ground.plan, ground.trainer, ground.constants
    shared = not plan.placements[ground.generator.name].gpus
    replicas = [ground.replica(number) for number in range(ground.replicas)]
    costs = {
        replica: _generator_costs(ground, replica, shared=shared)
        for replica in dict.fromkeys(replicas)
    }
    into = next(edge for edge in edges(graph) if edge.consumer == ground.maker.name)
    return coarse(
        Scenario(
            steps=steps,
            prompts_per_step=trainer.step_prompts,
            group_size=ground.group_size,
            max_staleness=ground.max_staleness,
            lengths=ground.lengths,
            prompt_tokens=ground.workload.prompt_tokens,
            generator=costs[replicas[0]],
            unlike=tuple(costs[replica] for replica in replicas) if len(costs) > 1 else (),
            trainer=_trainer_costs(ground, shared=shared),
            turns=ground.turns,
            world_s=ground.world_s,
            scorers={
                scorer.name: _scorer_costs(ground, scorer)
                for scorer in between(graph, ground.maker, trainer)
            },
            replicas=ground.replicas,
            in_flight=ground.generator.traits.capacity.in_flight,
            prompts_at_once=into.batch_rows,
            prompts_without_outcome=into.most_rows,
            prompts_slack=into.slack_rows,
            queue_prompts=trainer.traits.capacity.queue_prompts,
            hop_s=constants.hop_s,
            processors=(
                Processors(cores=plan.devices.cpus, alone=constants.alone)
                if shared
                else Processors()
            ),
            failures=failures or Failures(),
            moves_s={ground.called(name): seconds for name, seconds in ground.moves_s.items()},
        )
    )


def episode_of(graph: Structure, workload: Workload) -> Generate | None:
    """That of the graph. GraphError where there are several, or nobody says how many turns it
    has.
    """
    episodes = episodes_of(graph)
    if not episodes:
        return None
    name = episodes[0].name
    if len(episodes) > 1:
        raise GraphError(
            "a graph with one episode is foreseen for now, but this has"
            f" {[episode.name for episode in episodes]}; foresee it with one of them"
        )
    if name not in workload.turns:
        raise GraphError(
            f"'{name}' is an episode, and nobody knows before a run how many turns it has and how"
            f" long its world takes; give --workload {name}.turns=4,{name}.world=0.5, say, or"
            " --foresee with the folder of a run"
        )
    return episodes[0]


def between(graph: Structure, generator: Operator, trainer: Operator) -> list[Operator]:
    """The operators through which rollouts go on their way, the first ones first."""
    data = nx.DiGraph((a, b) for a, b, plane in graph.nx.edges(data="plane") if plane == "data")
    way = nx.descendants(data, generator.name) & nx.ancestors(data, trainer.name)
    return [
        graph.operators[name] for name in nx.lexicographical_topological_sort(data) if name in way
    ]


def _generator_costs(
    ground: Foreground, replica: GeneratorReplica, *, shared: bool
) -> GeneratorCosts:
    rates, prompt = ground.rates(ground.generator), ground.workload.prompt_tokens
    slots = min(ground.generator.traits.capacity.slots, rates.most_rollouts)
    if not ground.on_cpu:
        slots = min(slots, int(replica.at_once(prompt + 0.6 * ground.lengths.mean, rates)))
    step = [replica.step(n, 0.0, rates).seconds(rates) for n in range(slots + 1)]
    looks_back = (replica.step(1, 1000.0, rates).seconds(rates) - step[1]) / 1000 if slots else 0.0
    return GeneratorCosts(
        step_s=np.array(step),
        context_s=looks_back,
        prompt_s=prefill(replica, prompt, 1).seconds(rates),
        rollout_s=rates.end_s + rates.end_token_s * ground.lengths.mean,
        adopt_s=ground.constants.adopt_s,
        shared=(
            replica.ranks * ground.plan.placements[ground.generator.name].threads if shared else 0
        ),
    )


def _trainer_costs(ground: Foreground, *, shared: bool) -> TrainerCosts:
    trainer = ground.trainer
    learners, (passes_s, step_s) = ground.learners(trainer), training_s(ground)
    tokens = trainer.step_prompts * ground.group_size * ground.trained_tokens
    return TrainerCosts(
        step_s=step_s,
        token_s=passes_s / tokens,
        weights_s=ground.weights_s,
        shared=learners.ranks * ground.plan.placements[trainer.name].threads if shared else 0,
        part_tokens=math.inf
        if trainer.name in ground.in_turn
        or not trainer.traits.training.begins_early
        or not begins_early(ground.max_staleness, on_cpu=ground.on_cpu)
        else trainer.traits.training.micro_batch_tokens
        * (learners.ranks // trainer.traits.split.tensor_parallel),
    )


def training_s(ground: Foreground) -> tuple[float, float]:
    """Of a training step: seconds of its passes, which its tokens take, and of what it does
    besides.
    """
    trainer, rates = ground.trainer, ground.rates(ground.trainer)
    learners, tokens = ground.learners(trainer), ground.trained_tokens
    rollouts = float(trainer.step_prompts * ground.group_size)
    forward = learners.forward + trainer.traits.training.gradient_checkpointing
    passes_s = learners.passes(rollouts, tokens, forward=forward, sequences=rollouts).seconds(rates)
    passes_s += ground.waits_s(learners, passes_s, rollouts * tokens)
    passes_s += learners.channels(rollouts * tokens) * rates.channel_s
    back = ground.workload.prompt_tokens + ground.lengths.looks_back
    passes_s += learners.looks(rollouts * tokens, back) * rates.look_s
    micro_batches = learners.micro_batches(
        ground.computed * rollouts * tokens, trainer.traits.training.micro_batch_tokens
    )
    return ground.computed * passes_s, once_s(learners, rates, micro_batches) + ground.moments_s


def once_s(learners: Learners, rates: Rates, micro_batches: int) -> float:
    """Seconds that a training step spends once, plus those of each micro-batch that do not depend
    on tokens. On cores the ranks' exchanges are part of it, in passes and in the update, which goes
    over as many tensors; accelerators compute meanwhile.
    """
    exchanges = exchanges_of(learners) if learners.kind.name == "cpu" else 0
    return (
        learners.update().seconds(rates)
        + rates.step_s
        + micro_batches * learners.model.layers * (rates.layer_s + rates.wait_s)
        + (1 + micro_batches) * exchanges * rates.exchange_s
    )


def exchanges_of(learners: Learners) -> int:
    """Of the ranks of a trainer, in a step of one micro-batch."""
    return PER_LEARNT_LAYER * (learners.model.layers + 1) if learners.ranks > 1 else 0


def _scorer_costs(ground: Foreground, operator: Operator) -> ScorerCosts:
    workload = ground.workload
    drops, at_once = workload.drops.get(operator.name, 0.0), operator.traits.capacity.calls_at_once
    if operator.uses is not None:
        if not ground.plan.placements[operator.name].gpus and not ground.on_cpu:
            raise GraphError(
                f"'{operator.name}' computes with a model and has no devices here; give it some by "
                f"--gpus {operator.name}=.."
            )
        tokens = workload.prompt_tokens + ground.lengths.mean
        passes = ground.learners(operator).passes(1.0, tokens, forward=1.0, sequences=1.0)
        return ScorerCosts(row_s=passes.seconds(ground.rates(operator)), drops=drops)
    row_s = ground.row_s(operator.name) or 0.0
    return ScorerCosts(row_s=row_s, at_once=at_once, waits=at_once > 1, drops=drops)
