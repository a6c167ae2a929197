"""Leaves each rank its slices of a learner's model: tensor parallelism by transformers' plan, then
FSDP2.

gloo's own collectives copy what they are given, as much again for every layer, and its
reduce-scatter sends all ranks everything. Here each rank sends each other one its part, out of the
tensor that FSDP2 has, and takes theirs in.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from operators.models import adapters
from operators.models.folders import ModelError
from operators.models.heads import heads_of, place_of, settle_groups, shared_places
from operators.models.loading import fill, map_large_blocks
from operators.models.slices import held
from operators.training.learner.build import forward_of, learner_of
from operators.training.learner.copies import adds_up_in_float32
from operators.training.learner.policy import Policy
from operators.training.learner.together import local
from operators.training.parallel.mesh import MeshTogether, TrainerMesh

if TYPE_CHECKING:
    from dataflow.model import Model
    from dataflow.tokens.rollout_tokens import SamplingMask
    from operators.models.slices import Outline
    from operators.trainer import TrainerKnobs
    from operators.training.learner.learner import Forward, Learner
    from operators.training.learner.rows import TokenTree

BUFFER_BYTES = 8 << 20
"""Of gradients that have come from other ranks and are not added up yet."""
_NEVER = datetime.timedelta(days=365)
"""`operators.ranks.group` bounds all waits: gloo's own time-out runs on while the run is
stopped."""


class LayerBuffer:
    """Memory for one layer's exchange. It stays allocated: new memory each time would leave holes
    in the heap.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in it, in the place of the one before."""
        nbytes = math.prod(size) * dtype.itemsize
        if len(self._bytes) < nbytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)
            self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        return self._bytes[:nbytes].view(dtype).view(*size)


class DirectAllGather:
    """FSDP2's `AllGather`: parts come straight into the output."""

    def __init__(self, buffer: LayerBuffer) -> None:
        self._buffer = buffer

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that parameters are gathered in, before FSDP2 puts them in their places."""
        return self._buffer.take(size, dtype)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """input_tensor: [n], which may be this rank's place in output_tensor: [ranks * n], which is
        then whole.
        """
        parts, rank = output_tensor.view(group.size(), -1), group.rank()
        if parts[rank].data_ptr() != input_tensor.data_ptr():
            parts[rank].copy_(input_tensor)
        swap(group, lambda far: input_tensor, lambda far: parts[far])


class DirectReduceScatter:
    """FSDP2's `ReduceScatter`, of sums: added up in one order of ranks, so that they are the same
    each time.
    """

    def __init__(self, buffer: LayerBuffer) -> None:
        self._buffer = buffer
        self._has_input = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """For each call, first the gradients of a layer, then this rank's part of their sum, which
        outlives it.
        """
        if self._has_input:
            return torch.empty(*size, dtype=dtype)
        self._has_input = True
        return self._buffer.take(size, dtype)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """input_tensor: [ranks * n]. output_tensor: [n], then the sum of all ranks' parts for this
        one.
        """
        assert op == dist.ReduceOp.SUM, "gradients are added up"
        self._has_input = False
        ranks, rank = group.size(), group.rank()
        parts = input_tensor.view(ranks, -1)
        most = max(1, BUFFER_BYTES // (ranks * input_tensor.element_size()))
        came = input_tensor.new_empty(ranks, min(most, output_tensor.numel()))
        for begin in range(0, output_tensor.numel(), most):
            total = output_tensor[begin : begin + most]
            mine, theirs = parts[:, begin : begin + most], came[:, : len(total)]
            swap(group, mine.__getitem__, theirs.__getitem__)
            theirs[rank] = mine[rank]
            torch.sum(theirs, 0, out=total)


def exchange_directly(layer: Any, buffer: LayerBuffer) -> None:
    """Have a layer that FSDP2 shards over gloo exchange so. Nothing is gathered ahead: gloo's
    exchanges block, so that it would take memory and save no time.
    """
    layer.set_custom_all_gather(DirectAllGather(buffer))
    layer.set_custom_reduce_scatter(DirectReduceScatter(buffer))
    layer.set_modules_to_backward_prefetch([layer])


def swap(
    group: dist.ProcessGroup, give: Callable[[int], Tensor], take: Callable[[int], Tensor]
) -> None:
    """Send each other rank what is given for it, and fill what it sends, both contiguous; the next
    rank first, so that not all send to the same one.
    """
    peers = [(group.rank() + step) % group.size() for step in range(1, group.size())]
    works: list[Any] = [dist.irecv(take(far), group=group, group_src=far) for far in peers]
    works += [dist.isend(give(far), group=group, group_dst=far) for far in peers]
    for work in works:
        work.wait(_NEVER)


# Projections to fewer key/value heads than ranks: neighbouring ranks hold the same rows and add
# up their gradients.


def share(layer: Any, ranks: DeviceMesh, by_heads: DeviceMesh) -> None:
    """Leave a linear layer the rows of this rank's head; its inputs are the same on all ranks, as
    their gradients are.

    ranks: those that compute the layer together. by_heads: the same, as `TrainerMesh.by_heads`.
    """
    for name, weight in layer.named_parameters(recurse=False):
        dealt = distribute_tensor(
            weight.detach(), by_heads, [Shard(0), Replicate()], src_data_rank=None
        )
        layer._parameters[name] = nn.Parameter(dealt, requires_grad=weight.requires_grad)
    whole = layer.forward

    def forward(inputs: Tensor) -> Tensor:
        shared = DTensor.from_local(inputs, ranks, [Replicate()], run_check=False)
        parameters = dict(layer._parameters)
        layer._parameters.update({name: _local(weight) for name, weight in parameters.items()})
        try:
            return whole(shared.to_local(grad_placements=[Partial()]))  # type: ignore[no-any-return]
        finally:
            layer._parameters.update(parameters)

    layer.forward = forward


def _local(weight: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's rows. Each rank's queries give a part of their gradient; FSDP2 adds the parts up
    over the copies.
    """
    return (
        weight.to_local(grad_placements=[Shard(0), Partial()])
        if isinstance(weight, DTensor)
        else weight
    )


class Sharded:
    """A `Forward` whose parameters are gathered layer by layer while it computes, and given back
    after.
    """

    def __init__(self, module: Any, mesh: TrainerMesh, compute: torch.dtype | None) -> None:
        """module: whole, or on the meta device. compute: type in which parameters are gathered;
        None: their own. All ranks call `computed` as often.
        """
        self.module = module
        on_cpu = mesh.root.device_type == "cpu"
        precision = MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=not on_cpu
        )
        if on_cpu and compute is not None:
            adds_up_in_float32(module)
        whole = _Whole(module)
        buffer = None
        if on_cpu and mesh["fsdp"].size() > 1:
            map_large_blocks()
            buffer = LayerBuffer()
        embedding, head = ends_of(module)
        for part in [*layers_of(module), embedding, head, whole]:
            if part is None:
                continue
            # the backward pass begins with the head: there is no use in giving it back before, as
            # with the root
            shard: Any = fully_shard(
                part,
                mesh=mesh.data,
                mp_policy=precision,
                reshard_after_forward=False if part is head else None,
            )
            assert isinstance(shard, FSDPModule)
            # the loss is divided by the whole step's tokens already
            shard.set_gradient_divide_factor(1.0)
            shard.set_force_sum_reduction_for_comms(True)
            # whose gradient does not depend on it
            shard.set_unshard_in_backward(part is not embedding)
            if buffer is not None:
                exchange_directly(shard, buffer)
        self._whole: Any = whole
        self._forward: Forward | None = None
        tensor = mesh["tp"]
        self._alike = tensor.get_group() if tensor.size() > 1 else None

    def computes_by(self, forward: Forward, device: torch.device) -> None:
        """Say how it computes."""
        forward._device = device  # type: ignore[attr-defined]
        if isinstance(forward, Policy):
            forward.alike = self._alike
        self._forward = forward

    def take_memory(self, device: torch.device) -> None:
        """Have memory for this rank's parts of a module on the meta device, not set to anything."""
        self._whole._apply(
            lambda tensor: (
                torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
            )
        )
        self.module.tie_weights()

    @torch.no_grad()
    def made(self, make: Callable[[], Forward]) -> Forward:
        """What `make` makes, which may call the module for it; all ranks do so together."""
        forward: Forward = self._whole(make)
        for submodule in self._whole.modules():
            if isinstance(submodule, FSDPModule):
                submodule.reshard()
        return forward

    def at(self, temperature: float) -> None:
        """As the forward's."""
        assert self._forward is not None, "it was said how it computes"
        self._forward.at(temperature)

    def computed(
        self, packed: TokenTree, left_T: SamplingMask | None, wanted: Collection[str]
    ) -> dict[str, Tensor]:
        """As the forward's."""
        assert self._forward is not None, "it was said how it computes"
        outputs: dict[str, Tensor] = self._whole(self._forward.computed, packed, left_T, wanted)
        return outputs


class _Whole(nn.Module):
    """The root, which gathers what no layer has: the model is only read in here."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return call(*arguments)


def shard(
    learner: Learner,
    mesh: TrainerMesh,
    compute: torch.dtype | None,
    device: torch.device,
    name: str,
) -> None:
    """Turn a learner of a whole model in main memory, which has made no step, into that of one rank
    on `device`.

    Raises ModelError for a model that cannot be shared out.
    """
    forward = learner.forward
    _check_packs(forward, name)
    before = {id(weight): at for at, weight in forward.module.named_parameters()}
    sharded = shared_out(forward.module, mesh, compute, name)
    sharded.computes_by(forward, device)
    learner.forward = sharded
    learner.together = MeshTogether(mesh)
    after = dict(forward.module.named_parameters())
    for group in learner.optimizer.param_groups:
        group["params"] = [after[before[id(weight)]] for weight in group["params"]]
    learner.parameters = {at: weight for at, weight in after.items() if weight.requires_grad}


def read_slices(
    model: Model,
    outline: Outline,
    mesh: TrainerMesh,
    compute: torch.dtype | None,
    device: torch.device,
) -> Sharded:
    """One rank's part of a model, on `device`, read from the model's files; no rank has the whole.
    How it computes is set later. Raises ModelError as `shard`, and for an unreadable file.

    How it computes is not said yet. Raises ModelError as `shard`, and where a file cannot be
    read.
    """
    sharded = shared_out(outline.module, mesh, compute, model.name)
    sharded.take_memory(device)
    with torch.no_grad():
        tensors = {
            **dict(outline.module.named_parameters()),
            **dict(outline.module.named_buffers()),
        }
        fill(
            model,
            outline,
            {name: (local(tensors[name].detach()), held(tensors[name])) for name in outline.names},
        )
    return sharded


def learner_of_slices(
    trainer: TrainerKnobs,
    sharded: Sharded,
    mesh: TrainerMesh,
    device: torch.device,
    *,
    node: str,
    seed: int,
) -> Learner:
    """A learner of `read_slices`'s part; all ranks build theirs together. ModelError as `shard`."""
    forward = sharded.made(lambda: forward_of(trainer, sharded.module))
    _check_packs(forward, trainer.model.name)
    sharded.computes_by(forward, device)
    learner = learner_of(trainer, sharded, node=node, seed=seed)
    learner.together = MeshTogether(mesh)
    return learner


def shared_out(module: Any, mesh: TrainerMesh, compute: torch.dtype | None, name: str) -> Sharded:
    if mesh["tp"].size() > 1:
        cut(module, mesh, name)
    return Sharded(module, mesh, compute)


def _check_packs(forward: Forward, name: str) -> None:
    if not getattr(forward, "packs", True):
        raise ModelError(
            f"model '{name}' cannot be trained on several ranks: {type(forward.module).__name__}"
            " keeps its own attention, which is called once for each length, and ranks must be"
            " called alike; train it on one rank"
        )


def layers_of(module: Any) -> list[nn.Module]:
    """The layers that transformers would not split; empty where it names none."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    return [submodule for submodule in module.modules() if type(submodule).__name__ in names]


def ends_of(module: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """The embedding and the layer that gives logits, where each has weights of its own to be
    gathered.
    """
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    theirs = {
        id(weight)
        for layer in (embedding, head)
        if layer is not None
        for weight in layer.parameters()
    }
    is_tied = head is not None and len(theirs) < len([*embedding.parameters(), *head.parameters()])
    return (None, None) if is_tied else (embedding, head)


def cut(module: Any, mesh: TrainerMesh, name: str) -> None:
    """Leave in each layer of `module` this rank's slices of its matrices; the ends of the model
    stay whole.

    The head's rows are shared out instead (`head.logprobs_of_hidden`); FSDP shards its weight all
    the same. Raises ModelError as `heads_of`, and where an adapted layer is cut in a way
    that its adapters cannot be.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    ranks = mesh["tp"]
    heads = heads_of(module, ranks.size(), name)
    shared = shared_places(module.tp_plan) if heads.copies > 1 else []
    layers = {place: style for place, style in module.tp_plan.items() if "*" in place}
    theirs = {place: style for place, style in layers.items() if place not in shared}
    apply_tensor_parallelism(module, ranks, _expanded(module, theirs))
    if shared:
        assert mesh.by_heads is not None, "the mesh is made for the heads of the model"
        modules = dict(module.named_modules())
        for place in _expanded(module, {place: layers[place] for place in shared}):
            if place in modules:
                share(modules[place], ranks, mesh.by_heads)
    settle_groups(module, heads)


def _expanded(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """A plan by the names of modules and parameters; what it says of a module holds for its
    parameters too.

    Of an adapted layer it holds for the layer inside, and for that adapter that has the dimension
    which is cut.
    """
    styles: dict[str, str] = {}
    for name, submodule in module.named_modules():
        style = plan.get(place_of(name))
        if style is not None and adapters.is_adapted_layer(submodule):
            for part in adapters.parts_cut(name, style):
                styles |= {part: style} | {
                    f"{part}.{leaf}": style
                    for leaf, _ in module.get_submodule(part).named_parameters()
                }
            continue
        if style is not None:
            styles[name] = style
        for leaf, _ in submodule.named_parameters(recurse=False):
            own = plan.get(place_of(f"{name}.{leaf}"), style)
            if own is not None:
                styles[f"{name}.{leaf}"] = own
    return styles
