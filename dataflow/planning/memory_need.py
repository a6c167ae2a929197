"""What each process of a plan needs of its device's memory, part by part, and who does not fit:
pure functions.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dataflow.errors import GraphError
from dataflow.node import Generate, Learn, Operator
from dataflow.planning.model_size import ModelSize, bytes_of
from dataflow.planning.placement import Need, Spot, amount
from dataflow.structure import Structure, group_size, readers_of, refreshes_of, sources_of

# What a trainer holds of a micro-batch while it computes, by a model's widths: pure arithmetic.

_MOST_KEPT, _KEPT_OF_WEIGHT = 0.7, 1.5
"""Factors of the logits and of the head's weight: what the sliced head keeps for its backward pass,
at most."""
_SLICE, _CPU_SLICE = 1 << 25, 1 << 20
"""Logits of a slice on a GPU and on a CPU; two are held."""
_ENDS = 14
"""Bytes of a token around the head, in multiples of the model's width."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How a rank's forward and backward pass are made."""

    size: ModelSize
    wide: bool
    """Whether products are in float32, else in a type of two bytes."""
    trains: bool = True
    """Whether all weights are trained, else adapters alone."""
    rank: int = 0
    """Of adapters."""
    compiled: bool = False
    checkpointed: bool = False
    keeps_products: bool = False
    """Whether all but products and attention is computed again."""
    inputs_away: bool = False
    """Whether layers' inputs are in main memory until their backward passes."""
    shares: int = 1
    """Ranks that share out each layer."""
    gathers: bool = False
    """Whether a layer's weights lie on several ranks, which gather them for it (FSDP2)."""
    on_gpu: bool = True

    @property
    def of_layer(self) -> int:
        """Bytes that one layer keeps of a token for the backward pass."""
        size, nbytes = self.size, 4 if self.wide else 2
        heads = 3 * nbytes * size.query_width + 2 * nbytes * size.key_width
        normed = size.query_width + size.key_width if size.norms_heads else 0
        if self.compiled:  # what norms and activations made is computed again
            whole = (self.of_input + 3 * nbytes) * size.width
            return whole + (heads + 3 * nbytes * size.inner + nbytes * normed) // self.shares
        whole = self._around_products * size.width
        normed *= 8 if self.wide else 6 if self.trains else 4
        return (
            whole
            + (heads + 4 * nbytes * size.inner + normed) // self.shares
            + 7 * nbytes * self.rank
        )

    @property
    def of_products(self) -> int:
        """Bytes of a token that one layer keeps which keeps its input, products and attention."""
        size, nbytes = self.size, 4 if self.wide else 2
        inside = 2 * size.query_width + 2 * size.key_width + 2 * size.inner
        return 3 * nbytes * size.width + nbytes * inside // self.shares

    @property
    def _around_products(self) -> int:
        """Bytes in widths of the model: of two norms, and inputs of products where each has a copy
        of its own.
        """
        if self.wide:
            return 24 if self.trains else 16
        return 16 if self.trains else 18

    @property
    def of_input(self) -> int:
        """Bytes of a number that goes into a layer."""
        return 4 if self.wide else 2

    def at_most(self, tokens: int) -> int:
        """Bytes where a micro-batch of so many tokens is furthest: at the end of the forward pass,
        where the backward pass has begun and the head's gradient is there, or in a layer's backward
        pass.
        """
        size = self.size
        ends = self._head(tokens)
        if self.keeps_products:
            kept = self.of_products * size.layers * tokens
            again = self.of_layer * tokens
        elif self.checkpointed:
            layers = 2 if self.inputs_away else size.layers  # one that goes, or comes back
            kept = self.of_input * size.width * layers * tokens
            again = self.of_layer * tokens
        else:
            kept, again = self.of_layer * size.layers * tokens, 0
        last = self._backward(tokens) + again + self._reduced(size.largest_end)
        before = self._backward(tokens) + self._reduced(self._layer)
        before += again or -self.of_layer * tokens  # of a layer that is done, where all were kept
        ahead = self._gathered(size.largest_end + self._layer)
        return kept + max(ends + ahead, last, before if size.layers > 1 else 0)

    def one_layer(self, tokens: int) -> int:
        """Bytes at the end of the backward pass: the first layer's, or the second gradient of
        weights that embedding and head have in common.
        """
        size, layers = self.size, max(1, self.size.layers)
        layer = self.of_layer * tokens + self._backward(tokens)
        return max(
            layer + self._reduced(self._layer if layers > 1 else size.largest_end),
            4 * size.largest_end if size.tied and self.trains else 0,
        )

    @property
    def _layer(self) -> int:
        """Numbers of a layer that this rank computes with."""
        return self.size.linear_numbers // max(1, self.size.layers) // self.shares

    def _backward(self, tokens: int) -> int:
        """Bytes in a layer's backward pass beside what it kept: two gradients of the MLP's width
        and, of weights that are gathered, its own and the next one's, with the gradient of its last
        matrix.
        """
        size, nbytes = self.size, 4 if self.wide else 2
        inner = nbytes * size.inner // self.shares
        gradient = inner * size.width if self.gathers and self.trains else 0
        return 2 * inner * tokens + self._gathered(2 * self._layer) + gradient

    def _gathered(self, numbers: int) -> int:
        """Bytes of so many weights of other ranks, which are here for a while."""
        return (4 if self.wide else 2) * numbers if self.gathers else 0

    def _reduced(self, numbers: int) -> int:
        """Bytes of their gradients in float32, on the way to the ranks that add them up."""
        return 4 * numbers if self.gathers and self.trains else 0

    def _head(self, tokens: int) -> int:
        size = self.size
        vocabulary = size.largest_end // size.width if size.width else 0
        logits = -(-tokens // self.shares) * vocabulary  # of this rank's rows
        logits_kept = int(min(_MOST_KEPT * logits, _KEPT_OF_WEIGHT * size.largest_end))
        gradient = self.of_input * size.largest_end if self.trains else 0
        slices = 2 * min(_SLICE if self.on_gpu else _CPU_SLICE, logits)
        return 4 * (logits_kept + slices) + gradient + _ENDS * size.width * tokens


FILLED = 0.92
"""Of a GPU, what a generator fills whose cache takes what is free; the rest is for what no tensor
shows: CUDA's context, nodes of graphs, buffers of NCCL, holes."""
SPARE = 0.93
"""Of a device's memory, what a plan takes that chooses or advises: frameworks, and holes between
tensors, have the rest."""


def by_way(operator: Operator, knobs: Mapping[str, Any]) -> Operator:
    """The operator with other values of these knobs."""
    return replace(operator, **knobs) if knobs else operator


def first_way(
    operator: Operator, needs: Callable[[Operator], Need | None], room: int
) -> Mapping[str, Any]:
    """The first of its `ways` that leaves enough of a device free, the last where none does; none
    where nothing is left to choose. room: bytes of a device; 0: unknown, and the first is as good
    as any.
    """
    ways = operator.traits.ways
    for knobs in ways:
        need = needs(by_way(operator, knobs))
        if need is None or not room or need.total <= (FILLED if need.rollout else SPARE) * room:
            return knobs
    return ways[-1] if ways else {}


class DoesNotFit(GraphError):
    """A plan that needs more memory than a device has."""

    def __init__(self, message: str, *, missing: int) -> None:
        """missing: bytes."""
        super().__init__(message)
        self.missing = missing


def need_of(
    graph: Structure,
    operator: Operator,
    size: ModelSize | None,
    ranks: int,
    *,
    on_gpu: bool = False,
    in_turn: bool = False,
    trainer_ranks: int = 1,
) -> Need | None:
    """What one rank of an operator needs: the model's share, a generator's cache, a trainer's
    activations.

    on_gpu: whether its devices are accelerators. in_turn: whether it takes turns on its devices
    with others. trainer_ranks: of the trainer whose versions it reads. What cannot be told is left
    out, frameworks' own memory; of a cache that takes what is free, one rollout counts.
    """
    model = operator.uses
    if size is None or model is None:
        return None
    parts = size.parts(model.dtype, operator.trains, model.lora, operator.quantized)
    if operator.trains:
        parts["optimiser"] = parts["optimiser"] * operator.traits.training.moment_bytes // 4
    if refreshes := refreshes_of(graph, operator.name):
        parts["refreshed"] = sum(
            size.kept_bytes(model.dtype, refresh, model.lora) for refresh in refreshes
        )
    shares = ranks // operator.traits.split.dp_replicate
    of_adapters = {"adapters", "gradients", "optimiser", "refreshed"} if model.lora else set()
    held = size.held_numbers(operator.traits.split.tensor_parallel if operator.trains else 1)
    parts = {
        name: whole // shares if name in of_adapters else whole * held // (shares * size.parameters)
        for name, whole in parts.items()
    }
    if shares > 1 and not operator.trains and not isinstance(operator, Generate):
        parts["embedding or head while it computes"] = size.largest_end * bytes_of(model.dtype)
    grows: dict[str, int] = {}
    if isinstance(operator, Generate):
        parts["KV-cache"] = _cache(operator, size, bytes_of(model.dtype), ranks)
        if on_gpu and operator.traits.capacity.cache_bytes is None:
            grows = {"rollout": parts["KV-cache"], "slots": operator.traits.capacity.slots}
        if on_gpu:
            parts["a forward pass"] = _forward_pass(operator, size, bytes_of(model.dtype), ranks)
            parts["captured steps"] = _decode_step(operator, size, bytes_of(model.dtype), ranks)
    if operator.trains:
        _with_passes(
            parts,
            graph,
            operator,
            size,
            ranks,
            on_gpu=on_gpu,
            away=in_turn or operator.traits.training.offloads,
        )
    if on_gpu:
        parts["version on its way"] = _version(graph, operator, size, ranks, in_turn, trainer_ranks)
    return Need({name: part for name, part in parts.items() if part}, **grows)


def asleep_bytes(graph: Structure, operator: Operator, size: ModelSize | None, ranks: int) -> int:
    """Bytes of main memory that all ranks of an operator fill while others have their turn on its
    accelerators.
    """
    model = operator.uses
    fed = any(feedback.reader is operator for feedback in graph.feedbacks)
    if size is None or model is None or (fed and model.lora is None):
        return 0  # weights come again from the trainer's
    parts = size.parts(model.dtype, operator.trains, model.lora)
    return operator.traits.split.dp_replicate * sum(
        part for name, part in parts.items() if name != "gradients"
    )


def arriving_bytes(operator: Operator, size: ModelSize | None) -> int:
    """Bytes of main memory in which all ranks of a reader receive a version."""
    model = operator.uses
    if size is None or model is None or not operator.traits.arrives_in_host:
        return 0
    return size.sent_bytes(model.dtype, model.lora, 1, operator.quantized)


def inputs_bytes(graph: Structure, operator: Operator, size: ModelSize | None) -> int:
    """Bytes of main memory in which a trainer's rank keeps what goes into layers."""
    if size is None or operator.uses is None or not operator.traits.training.inputs_in_host:
        return 0
    tokens, _ = _micro_batch(graph, operator)
    return bytes_of(operator.uses.dtype) * size.width * size.layers * tokens


def _version(
    graph: Structure,
    operator: Operator,
    size: ModelSize,
    ranks: int,
    in_turn: bool,
    trainer_ranks: int,
) -> int:
    """Bytes of a version between trainer and reader on this operator's accelerator: a trainer of
    one rank has it on its own; of several ranks, it lies in its reader's buffer, and where these
    copy their weights to be sent, two copies lie on theirs.
    """
    model = operator.uses
    if operator.traits.arrives_in_host and not in_turn:
        return 0
    read = [
        feedback
        for feedback in graph.feedbacks
        if operator.name in (feedback.weights.trainer.name, feedback.reader.name)
    ]
    is_one = (ranks if operator.trains else trainer_ranks) == 1
    if model is None or not read:
        return 0
    if not in_turn and operator.trains and not is_one and operator.traits.training.copies_weights:
        shares = ranks // operator.traits.split.dp_replicate
        copies = 2 * size.sent_bytes(model.dtype, model.lora, shares)
        held = size.held_numbers(operator.traits.split.tensor_parallel)
        return copies if model.lora else copies * held // size.parameters
    if not in_turn and is_one != operator.trains:
        return 0
    formats = {reader.quantized for reader in readers_of(graph, read[0].weights.trainer.name)}
    return size.sent_bytes(
        model.dtype,
        model.lora,
        1 if is_one else read[0].reader.traits.split.tensor_parallel,
        formats.pop() if len(formats) == 1 else None,
    )


def check_fit(needs: Iterable[tuple[str, Spot, Need]], room: Mapping[Spot, int]) -> None:
    """Refuse processes that do not fit on their devices together. GraphError with the sum and its
    parts.

    needs: by process, where it is and what it needs. room: bytes by device; a device of unknown
    size is left out.
    """
    on: dict[Spot, list[tuple[str, Need]]] = {}
    for process, spot, need in needs:
        on.setdefault(spot, []).append((process, need))
    for spot, processes in on.items():
        total = sum(need.total for _, need in processes)
        fills = any(need.rollout for _, need in processes)
        most = int(FILLED * room.get(spot, 0)) if fills else room.get(spot, 0)
        if most and total > most:
            needs_told = " + ".join(f"'{process}' {need}" for process, need in processes)
            host, device = spot
            place = (
                "main memory"
                if device == "cpu"
                else f"the memory of gpu {device.removeprefix('cuda:')}"
            )
            place += f" of host '{host}'" if host else ""
            raise DoesNotFit(
                f"the plan does not fit into {place}: it needs at least {amount(total)} of"
                f" {amount(most)}; found {needs_told};"
                f" {_ways_out(need for _, need in processes)}",
                missing=total - most,
            )


def _cache(operator: Generate, size: ModelSize, nbytes: int, ranks: int) -> int:
    """Bytes of keys and values: of one rollout of full length, or of as many as its budget and its
    slots allow.
    """
    traits = operator.traits
    context = traits.sampling.context_tokens or size.context
    sequence = context * (size.cache_elements // min(ranks, size.key_value_heads or ranks)) * nbytes
    return (
        sequence
        if traits.capacity.cache_bytes is None
        else max(sequence, min(traits.capacity.cache_bytes, sequence * traits.capacity.slots))
    )


def _forward_pass(operator: Generate, size: ModelSize, nbytes: int, ranks: int) -> int:
    """Bytes of a generator's largest forward pass, at the end of its longest prompt, with the draw:
    a layer gathers keys and values from their pages where more stand there than are new.
    """
    tokens = operator.traits.capacity.prefill_tokens
    context = operator.traits.sampling.context_tokens or size.context
    heads = min(ranks, size.key_value_heads or ranks)
    within = tokens * _inferred(size, nbytes, ranks)
    if context > tokens:
        beside = 2 * nbytes * tokens * (size.width + size.query_width // ranks)
        within = max(within, 2 * nbytes * context * size.key_width // heads + beside)
    return within + _drawn(operator, size, nbytes)


def _decode_step(operator: Generate, size: ModelSize, nbytes: int, ranks: int) -> int:
    """Bytes that captured decode steps keep: what one of all its rows takes."""
    capacity = operator.traits.capacity
    rows = capacity.slots + capacity.ahead_tokens
    return rows * _inferred(size, nbytes, ranks) + _drawn(operator, size, nbytes)


def _inferred(size: ModelSize, nbytes: int, ranks: int) -> int:
    """Bytes of a token in the fullest place of a layer without gradients: in its attention, its
    MLP, or a norm in float32.
    """
    attention = 4 * size.width + (5 * size.query_width + 4 * size.key_width) // ranks
    products = 4 * size.width + 3 * size.inner // ranks
    return max(nbytes * max(attention, products), (nbytes + 12) * size.width)


def _drawn(operator: Generate, size: ModelSize, nbytes: int) -> int:
    """Bytes of the logits of all slots, in the model's type and three times in float32."""
    vocabulary = size.largest_end // size.width if size.width else 0
    return operator.traits.capacity.slots * vocabulary * (nbytes + 12)


def _with_passes(
    parts: dict[str, int],
    graph: Structure,
    operator: Operator,
    size: ModelSize,
    ranks: int,
    *,
    on_gpu: bool,
    away: bool,
) -> None:
    """Add what a trainer's rank holds beside its share of the model while it computes.

    away: whether the optimiser's state is elsewhere until the update.
    """
    model, traits = operator.uses, operator.traits
    assert model is not None, "a trainer has a model"
    gathers = ranks // traits.split.dp_replicate > 1
    passes = Passes(
        size=size,
        wide=model.dtype == "float32",
        trains=model.lora is None,
        rank=model.lora.rank if model.lora is not None else 0,
        compiled=traits.training.compiled,
        on_gpu=on_gpu,
        checkpointed=traits.training.gradient_checkpointing,
        keeps_products=traits.training.keeps_products and not traits.training.compiled,
        inputs_away=traits.training.inputs_in_host,
        shares=traits.split.tensor_parallel,
        gathers=gathers,
    )
    if not gathers and not passes.wide:
        parts["compute copies"] = parts["gradients"] * bytes_of(model.dtype) // 4
    tokens, is_only = _micro_batch(graph, operator)
    activations = passes.at_most(tokens)
    if is_only:  # gradients come as activations go
        activations = max(activations - parts["gradients"], passes.one_layer(tokens))
    if away:
        moments = parts.pop("optimiser")
        parts["optimiser at the update" if moments > activations else "activations"] = max(
            activations, moments
        )
    else:
        parts["activations"] = activations


def _micro_batch(graph: Structure, operator: Operator) -> tuple[int, bool]:
    """Tokens of a micro-batch, no more than the completions of a step may have and no less than one
    of them, and whether a step has no other.
    """
    tokens = operator.traits.training.micro_batch_tokens
    generators = [op for op in graph.operators.values() if isinstance(op, Generate)]
    longest = [
        tokens if op.traits.sampling.max_tokens is None else op.traits.sampling.max_tokens
        for op in generators
    ]
    groups = [group_size(graph, source) or 1 for source in sources_of(graph, operator.name)]
    prompts = operator.step_prompts if isinstance(operator, Learn) else 1
    if longest and groups:
        most = prompts * max(groups) * max(longest)
        return min(max(tokens, *longest), most), most <= tokens
    return tokens, False


def rollouts_of(need: Need, room: int) -> tuple[int, int]:
    """Bytes of a cache that takes what is free of a device with so much room, and rollouts of full
    length that it holds.
    """
    free = int(FILLED * room) - need.total + need.rollout
    count = min(need.slots, free // need.rollout)
    return count * need.rollout, count


def _ways_out(needs: Iterable[Need]) -> str:
    parts = {name for need in needs for name in need.parts}
    ways = ["give it more devices or a smaller model"]
    if "gradients" in parts:
        ways += ["Model(lora=...)", "lower micro_batch_tokens or set gradient_checkpointing"]
    if "KV-cache" in parts:
        ways.append("lower cache_bytes or context_tokens")
    if {"KV-cache", "version on its way"} <= parts:
        ways.append(
            'Generator(tensor_parallel=...), weights="fp8", arrives_in="host" or accelerators with'
            " more memory, as two versions have to fit"
        )
    return ", or ".join(ways)
