"""What each process of a plan needs of its device's memory, part by part, and who does not fit: pure functions."""

from collections.abc import Iterable, Mapping

from dataflow.errors import GraphError
from dataflow.node import Generate, Learn, Operator
from dataflow.planning.model_size import ModelSize, bytes_of
from dataflow.planning.placement import Need, Spot, amount
from dataflow.structure import Structure, group_size, refreshes_of, sources_of

_KEPT = 16
"""Numbers that a layer keeps of each token for the backward pass, in widths of the model; 1 where it computes them
again."""


def need_of(graph: Structure, operator: Operator, size: ModelSize | None, ranks: int) -> Need | None:
    """What one rank of an operator needs: the model's share, a generator's cache, a trainer's activations.

    What cannot be told is left out: frameworks' own memory, buffers of a step, a cache that takes what is free beyond
    one rollout.
    """
    model = operator.uses
    if size is None or model is None:
        return None
    parts = size.parts(model.dtype, operator.trains, model.lora, operator.quantized)
    if refreshes := refreshes_of(graph, operator.name):
        parts["refreshed"] = sum(size.kept_bytes(model.dtype, refresh, model.lora) for refresh in refreshes)
    shares = ranks // operator.traits.dp_replicate
    parts = {name: whole // shares for name, whole in parts.items()}
    if shares > 1 and not operator.trains and not isinstance(operator, Generate):
        parts["embedding or head while it computes"] = size.largest_end * bytes_of(model.dtype)
    if isinstance(operator, Generate):
        parts["KV-cache"] = _cache(operator, size, bytes_of(model.dtype), ranks)
    if operator.trains:
        parts["activations"] = _activations(graph, operator, size, bytes_of(model.dtype))
    return Need({name: part for name, part in parts.items() if part})


def check_fit(needs: Iterable[tuple[str, Spot, Need]], room: Mapping[Spot, int]) -> None:
    """Refuse processes that do not fit on their devices together. GraphError with the sum and its parts.

    needs: by process, where it is and what it needs. room: bytes by device; a device of unknown size is left out.
    """
    on: dict[Spot, list[tuple[str, Need]]] = {}
    for process, spot, need in needs:
        on.setdefault(spot, []).append((process, need))
    for spot, processes in on.items():
        total = sum(need.total for _, need in processes)
        if room.get(spot) and total > room[spot]:
            told = " + ".join(f"'{process}' {need}" for process, need in processes)
            host, device = spot
            place = "main memory" if device == "cpu" else f"the memory of gpu {device.removeprefix('cuda:')}"
            place += f" of host '{host}'" if host else ""
            raise GraphError(
                f"the plan does not fit into {place}: it needs at least {amount(total)} of {amount(room[spot])}; "
                f"found {told}; {_ways_out(need for _, need in processes)}"
            )


def _cache(operator: Generate, size: ModelSize, each: int, ranks: int) -> int:
    """Keys and values: of one rollout of full length, or as many as its budget and its slots are for."""
    traits = operator.traits
    context = traits.context_tokens or size.context
    one = context * (size.cache_elements // min(ranks, size.key_value_heads or ranks)) * each
    return one if traits.cache_bytes is None else max(one, min(traits.cache_bytes, one * traits.slots))


def _activations(graph: Structure, operator: Operator, size: ModelSize, each: int) -> int:
    """What the layers keep of a micro-batch, of no more tokens than the completions of a step may have."""
    traits, tokens = operator.traits, operator.traits.micro_batch_tokens
    generators = [op for op in graph.operators.values() if isinstance(op, Generate)]
    longest = [tokens if op.traits.max_tokens is None else op.traits.max_tokens for op in generators]
    groups = [group_size(graph, source) or 1 for source in sources_of(graph, operator.name)]
    prompts = operator.step_prompts if isinstance(operator, Learn) else 1
    if longest and groups:
        tokens = min(tokens, prompts * max(groups) * max(longest))
    kept = 1 if traits.gradient_checkpointing else _KEPT
    return tokens * size.layers * size.width * kept * each // traits.tensor_parallel


def _ways_out(needs: Iterable[Need]) -> str:
    parts = {name for need in needs for name in need.parts}
    ways = ["give it more devices or a smaller model"]
    if "optimiser" in parts:
        ways += ["Model(lora=...)", "lower micro_batch_tokens or set gradient_checkpointing"]
    if "KV-cache" in parts:
        ways.append("lower cache_bytes or context_tokens")
    return ", or ".join(ways)
