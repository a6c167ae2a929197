"""A large run on paper, all of it left to the plan: what is chosen, what each rank holds, how ranks
reach each other, and how long an exchange and a step take. Every line names its source.

plan: the product's, as `--gpus auto` has it. tracker: the code of a rank on fake tensors, as rank 0
of a fake process group (`bench.memory.tracked`), at two depths of the model, all of whose layers
are alike; what it holds of the others follows (`bench.memory.planned` has whole models, in minutes
to an hour). arithmetic: bytes over rates of data sheets, or a
count. foresight: a run of the graph by the clock, at assumed rates.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.gpu.trainer import Load
from bench.memory.planned import CONFIGS, GIB, write
from bench.memory.tracked import Held, tracked, tracked_budget
from bench.report import Report
from dataflow import Graph, Model, scorer
from dataflow.foresight.catalogue import device_kind
from dataflow.foresight.choice.search import SearchResult, choose
from dataflow.foresight.command import read_devices
from dataflow.foresight.counts import size_of
from dataflow.foresight.workload import Workload
from dataflow.planning.memory_need import need_of
from dataflow.planning.model_size import ModelSize
from dataflow.planning.placement import Need, Placement
from dataflow.planning.plan import Plan, plan
from operators import Generator, Prompts, Trainer
from operators.credit import advantage
from transport.weights.costs.decoder import Decoder
from transport.weights.costs.explain import Interconnect
from transport.weights.costs.on_paper import OnPaper, RankGrid, on_paper

GROUP, TOKENS, PROMPT, STALENESS = 8, 2048, 200, 4
"""Rollouts of a prompt, most tokens of each, those of a prompt, versions behind."""
PLAN, TRACKER = "plan", "tracker"
DEPTHS = 4, 8
"""Layers of the models that a trainer is tracked with."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model, and devices for it."""

    model: str
    devices: str
    prompts: int
    """Of a step."""


TARGETS = {
    "7b": Target(model="qwen2.5-7b", devices="8xH100", prompts=64),
    "70b": Target(model="llama-70b", devices="64xH100", prompts=256),
    "405b": Target(model="llama-405b", devices="1024xH100", prompts=1024),
}


@scorer(isolate=False)
def reward(tokens: list[int]) -> float:
    """Any."""
    return float(tokens[-1] % 2)


def graph_of(target: Target, folder: Path) -> Graph:
    """GRPO's streams with what an experiment decides, and nothing that devices decide."""
    g, model = Graph("paper"), Model(str(folder), dtype="bfloat16")
    generator = Generator(model, group_size=GROUP, max_tokens=TOKENS)
    trainer = Trainer(model, prompts_per_step=target.prompts)
    trainer(advantage(reward(generator(g.source(Prompts([{"prompt": "a"}]))))))
    g.feedback(trainer.weights, generator, max_staleness=STALENESS)
    return g


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen:
    """What the search has come to."""

    target: Target
    graph: Graph
    """With the knobs that it chose."""
    plan: Plan
    result: SearchResult
    size: ModelSize

    @property
    def generator(self) -> Generator:
        operator = self.graph.operators["generator"]
        assert isinstance(operator, Generator)
        return operator

    @property
    def trainer(self) -> Trainer:
        """Settled, but for what the tracker does not see: compiled layers."""
        operator = self.graph.operators["trainer"]
        assert isinstance(operator, Trainer)
        knobs = {**self.plan.placements["trainer"].chosen, "compile": False}
        return replace(operator, **knobs, skip_zero_advantage=False, keep_new_logprobs=False)

    @cached_property
    def paper(self) -> OnPaper:
        """The exchange of a version."""
        kind = device_kind(self.plan.devices.hosts[0].kind)
        trainer, generator = (self.plan.placements[name] for name in ("trainer", "generator"))
        split = trainer.split
        return on_paper(
            Decoder.of(self.generator.model.source),
            RankGrid(
                replicas=split.dp_replicate,
                shards=trainer.ranks // split.least_ranks,
                tensor_parallel=split.tensor_parallel,
            ),
            RankGrid(replicas=generator.replicas, tensor_parallel=generator.ranks),
            Interconnect(
                gpus_per_node=kind.per_node,
                within_bytes_per_s=kind.within_bytes_per_s,
                between_bytes_per_s=kind.between_bytes_per_s,
                destination_first=trainer.ranks,
            ),
            quantized=self.generator.quantized,
        )


def chosen(target: Target, folder: Path) -> Chosen:
    """Search, and plan what was found. GraphError where nothing fits."""
    graph, devices = graph_of(target, folder), read_devices(target.devices)
    result = choose(graph, devices, workload=Workload(prompt_tokens=PROMPT))
    candidate = result.ways[0].candidate
    placed, size = candidate.placed(graph), size_of(str(folder))
    made = plan(placed, candidate.on(devices), gpus=candidate.wishes, sizes={str(folder): size})
    return Chosen(target=target, graph=placed, plan=made, result=result, size=size)


Line = tuple[str, str, str]
"""What, how much, and its source."""


def lines(made: Chosen) -> Iterator[Line]:
    """All that is known of it, what takes long last."""
    best = made.result.ways[0]
    yield "asked", best.flags, f"{PLAN}: {made.result.tried} ways looked at"
    for name in ("generator", "trainer"):
        yield from _of_node(made, made.plan.placements[name])
    yield from _exchange(made)
    step = best.foreseen
    yield (
        "a step",
        f"{step.step_s:.3g} s of {step.rollouts:,.0f} rollouts,"
        f" '{step.bottleneck.node}' is busy longest, efficiency {step.efficiency:.2f}",
        "foresight",
    )
    yield from _memory(made)


def _of_node(made: Chosen, placement: Placement) -> Iterator[Line]:
    text = f"{placement.replicas} x {placement.ranks} ranks"
    text += f", {placement.mesh}" * bool(placement.mesh)
    text += f", {placement.choice}" * bool(placement.choice)
    yield placement.node, text, PLAN


def _memory(made: Chosen) -> Iterator[Line]:
    """Of a rank of each, by plan and tracker."""
    room = made.plan.devices.hosts[0].gpu_memory_bytes
    for name in ("generator", "trainer"):
        need = made.plan.placements[name].need
        assert need is not None, "the config tells the size"
        yield f"rank of {name}", f"{need} of {room / GIB:.1f} GiB", PLAN
    yield from _tracked_passes(made)
    yield from _tracked_trainer(made)


def _tracked_passes(made: Chosen) -> Iterator[Line]:
    """Of two layers, whose memory is free again after each."""
    placement, generator = made.plan.placements["generator"], made.generator
    began = time.monotonic()
    with _shallow(made, 2) as model:
        budget = tracked_budget(replace(generator, model=model), 1 << 40, placement.ranks)
    need = need_of(made.graph, generator, made.size, placement.ranks, on_gpu=True)
    assert need is not None, "the config tells the size"
    drawn = generator.slots * (made.size.largest_end // made.size.width) * 12
    yield (
        "passes of generator",
        _compared(
            need.parts["a forward pass"] + need.parts["captured steps"],
            budget.passes + budget.graphs + 2 * drawn,
        ),
        _since(began),
    )


@contextlib.contextmanager
def _shallow(made: Chosen, layers: int) -> Iterator[Model]:
    """The model with so many layers."""
    with tempfile.TemporaryDirectory() as folder:
        write({**CONFIGS[made.target.model], "num_hidden_layers": layers}, Path(folder))
        yield replace(made.generator.model, source=folder)


def _tracked_trainer(made: Chosen) -> Iterator[Line]:
    placement, trainer = made.plan.placements["trainer"], made.trainer
    began = time.monotonic()
    tokens = trainer.traits.training.micro_batch_tokens
    load = Load(rollouts=max(2, 2 * tokens // TOKENS), tokens=min(TOKENS, tokens))
    held = []
    for layers in DEPTHS:
        with _shallow(made, layers) as model:
            held.append(tracked(replace(trainer, model=model), placement.ranks, load))
    few, more = held
    each = (more.most - few.most) // (DEPTHS[1] - DEPTHS[0])
    most = more.most + (made.size.layers - DEPTHS[1]) * each
    need = need_of(made.graph, trainer, made.size, placement.ranks, on_gpu=True)
    assert need is not None, "the config tells the size"
    yield "rank of trainer, not compiled", _compared(_counted(need), most), _since(began)
    yield "communicators", _communicators(made.plan, more), "a count of process groups; plan"


def _counted(need: Need) -> int:
    """Of what the tracker sees."""
    return need.total - need.parts.get("version on its way", 0)


def _compared(planned: int, tracked: int) -> str:
    return f"{tracked / GIB:.2f} GiB, planned {planned / GIB:.2f} ({planned / tracked - 1:+.1%})"


def _since(began: float) -> str:
    return f"{TRACKER}, {time.monotonic() - began:.0f} s"


def _communicators(made: Plan, held: Held) -> str:
    executors = sorted({path.executor for path in made.weight_paths})
    weights = int("nccl" in executors)
    own = int(made.placements["generator"].ranks > 1)
    return (
        f"of a trainer's rank {held.groups} + {weights}, of a generator's {own} + {weights} (ranks"
        f" of the model + weights by {', '.join(executors)}, one for all readers)"
    )


def _exchange(made: Chosen) -> Iterator[Line]:
    paper, generator = made.paper, made.plan.placements["generator"]
    source = f"arithmetic over data sheet's links of {made.target.devices}"
    (rounds,) = (line for line in str(paper).splitlines() if " rounds " in line)
    yield "rounds of an exchange", rounds, source
    most = max(int(paper.plan.pair_bytes.sum(axis=side).max()) for side in (0, 1))
    into = int(paper.plan.pair_bytes.sum(axis=0).max())
    yield "bytes of an exchange", f"{most / 1e9:.3g} GB at most out of or into a rank", source
    if generator.arrives_in_host:
        kind = device_kind(made.plan.devices.hosts[0].kind)
        seconds = into / kind.host_bytes_per_s
        yield "copied from main memory", f"{seconds:.3g} s, decoding waits", source
    foreseen = made.result.ways[0].foreseen
    yield "a version of the weights", f"{foreseen.weights_s:.3g} s", "foresight"


def show(names: Sequence[str], console: Console, report: Report) -> int:
    """Print each target as it comes; 0. GraphError where one is refused."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            target = TARGETS[name]
            title = f"{target.model} on {target.devices}"
            console.print(title, style="bold")
            made = chosen(target, write(CONFIGS[target.model], Path(folder) / target.model))
            for what, value, source in lines(made):
                console.print(f"  {what}: {value} [{source}]", markup=False, highlight=False)
                figures: dict[str, Any] = {"value": value, "source": source}
                report.add(case=title, system=what, **figures)
    return 0
