"""What makes a plan fit that does not: knobs are tried, and named by the program's flags where it
has them.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce
from typing import Any

from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.model import LoRA, Model
from dataflow.node import Generate, Operator
from dataflow.planning.hosts import Devices
from dataflow.planning.memory_need import SPARE, DoesNotFit
from dataflow.planning.plan import Plan, plan

FLAGS: ContextVar[frozenset[str]] = ContextVar("flags", default=frozenset())
"""Names of the flags of the program that asks, as gradient_checkpointing."""
_LEAST_TOKENS = 1024
"""Of a micro-batch: smaller ones keep a device waiting."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One knob with another value."""

    knob: str
    value: Any
    of: str
    """The operator that has it, for people."""
    apply: Callable[[Graph], Graph]

    def __str__(self) -> str:
        """Its flag, or as it is declared."""
        if self.knob in FLAGS.get():
            value = "" if self.value is True or isinstance(self.value, LoRA) else f" {self.value}"
            return f"--{self.knob.replace('_', '-')}{value}"
        value = f"LoRA({self.value.rank})" if isinstance(self.value, LoRA) else repr(self.value)
        return f"{self.knob}={value} of {self.of}"


def plan_or_advise(graph: Graph, devices: Devices, **how: Any) -> Plan:
    """As `plan`; its refusal of what does not fit says which knobs would make it fit.

    how: as `plan` has it. GraphError as `plan`.
    """
    try:
        return plan(graph, devices, **how)
    except DoesNotFit as error:
        raise advised(
            error, graph, lambda changed: bool(plan(changed, roomy(devices), **how))
        ) from None


def advised(error: DoesNotFit, graph: Graph, fits: Callable[[Graph], bool]) -> GraphError:
    """The same refusal with the remedy: the first change that makes the graph fit, or the fewest
    together.
    """
    remedies = ways_out(graph, fits)
    do = (
        f"{' and '.join(map(str, remedies))} would make it fit"
        if remedies
        else ("give it more devices or a smaller model: no knob that was tried makes it fit")
    )
    return GraphError(f"{str(error).rpartition('; ')[0]}; {do}")


def ways_out(graph: Graph, fits: Callable[[Graph], bool]) -> Sequence[Remedy] | None:
    """The first change that makes it fit; else the first few that do so together and are all
    needed; None: none do.
    """
    tried = list(changes(graph))
    for change in tried:
        if _fits([change], graph, fits):
            return [change]
    for count in range(2, len(tried) + 1):
        if _fits(tried[:count], graph, fits):
            remedies = tried[:count]
            for change in reversed(tried[: count - 1]):
                fewer = [remedy for remedy in remedies if remedy is not change]
                remedies = fewer if _fits(fewer, graph, fits) else remedies
            return remedies
    return None


def roomy(devices: Devices) -> Devices:
    """The devices with as much memory as an advised plan may use."""
    if not devices.hosts:
        return dataclasses.replace(devices, gpu_memory_bytes=int(SPARE * devices.gpu_memory_bytes))
    hosts = [
        dataclasses.replace(host, gpu_memory_bytes=int(SPARE * host.gpu_memory_bytes))
        for host in devices.hosts
    ]
    return Devices.of(hosts, devices.link_bytes_per_s)


def changes(graph: Graph) -> Iterator[Remedy]:
    """Changes to try, cheapest first. Only adapters change what is learned."""
    trainers = [
        operator
        for operator in graph.operators.values()
        if operator.trains and operator.uses is not None
    ]
    generators = [
        operator
        for operator in graph.operators.values()
        if isinstance(operator, Generate) and operator.uses is not None
    ]
    longest = max(
        (generator.traits.sampling.max_tokens or 0 for generator in generators), default=0
    )
    for trainer in trainers:
        training = trainer.traits.training
        if not (training.gradient_checkpointing or "gradient_checkpointing" in _open(trainer)):
            yield from _knob(trainer, "gradient_checkpointing", True)
    models = {trainer.uses: trainer for trainer in trainers if trainer.uses is not None}
    for model, owner in models.items():
        if model.dtype == "float32":
            yield _model(model, owner, "dtype", "bfloat16")
    for trainer in trainers:
        tokens = trainer.traits.training.micro_batch_tokens
        for fewer in (tokens // 2, tokens // 4):
            if fewer >= max(_LEAST_TOKENS, longest) and "micro_batch_tokens" not in _open(trainer):
                yield from _knob(trainer, "micro_batch_tokens", fewer)
    for trainer in trainers:
        if not trainer.traits.training.offloads:
            yield from _knob(trainer, "offload", True)
    for trainer in trainers:
        if trainer.traits.training.moment_bytes == 4 and trainer.uses and not trainer.uses.lora:
            yield from _knob(trainer, "moments", "bfloat16")
    for generator in generators:
        shorter = longest + _LEAST_TOKENS
        if (
            generator.traits.sampling.context_tokens is None
            or generator.traits.sampling.context_tokens > shorter
        ):
            yield from _knob(generator, "context_tokens", shorter)
    for model, owner in models.items():
        if model.lora is None:
            yield _model(model, owner, "lora", LoRA(16))
    for generator in generators:
        for ranks in (2, 4, 8):
            if ranks > generator.traits.split.tensor_parallel:
                yield from _knob(generator, "tensor_parallel", ranks)


def _open(operator: Operator) -> Collection[str]:
    """Knobs that are left to the plan, which has tried them."""
    return {knob for way in operator.traits.ways for knob in way}


def _knob(operator: Operator, knob: str, value: Any) -> Iterator[Remedy]:
    if any(field.name == knob for field in dataclasses.fields(operator)):
        name, knobs = operator.name, {knob: value}

        def apply(graph: Graph) -> Graph:
            return graph.swap_all({name: dataclasses.replace(graph.operators[name], **knobs)})

        yield Remedy(knob=knob, value=value, of=f"'{name}'", apply=apply)


def _model(model: Model, owner: Operator, knob: str, value: Any) -> Remedy:
    """The remedy for a model that several operators share, in all of them."""
    knobs = {knob: value}

    def apply(graph: Graph) -> Graph:
        now = graph.operators[owner.name].uses
        return graph.swap_all(
            {
                name: dataclasses.replace(
                    operator, model=dataclasses.replace(operator.uses, **knobs)
                )  # type: ignore[call-arg]
                for name, operator in graph.operators.items()
                if operator.uses is not None
                and now is not None
                and operator.uses.source == now.source
                and (knob != "lora" or not operator.uses.is_frozen)
            }
        )

    return Remedy(knob=knob, value=value, of=f"model '{model.name}'", apply=apply)


def _fits(changes: Sequence[Remedy], graph: Graph, fits: Callable[[Graph], bool]) -> bool:
    try:
        return fits(reduce(lambda changed, change: change.apply(changed), changes, graph))
    except GraphError:
        return False
