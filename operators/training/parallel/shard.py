"""Leaves each rank its slices of a learner's model: tensor parallelism by transformers' plan, then FSDP2."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from operators.models import adapters
from operators.models.errors import ModelError
from operators.models.heads import heads_of, place_of, settle_groups, shared_places
from operators.training.parallel.mesh import MeshTogether, TrainerMesh
from operators.training.parallel.shared_heads import share

if TYPE_CHECKING:
    from dataflow.rollout_tokens import SamplingMask
    from operators.training.learner.learner import Forward, Learner
    from operators.training.learner.packing import TokenTree


class Sharded:
    """A `Forward` whose parameters are gathered layer by layer while it computes, and given back after."""

    def __init__(self, forward: Forward, mesh: TrainerMesh, compute: torch.dtype | None, device: torch.device) -> None:
        """compute: type in which parameters are gathered; None: their own. All ranks call `computed` as often."""
        self.module = forward.module
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        whole = _Whole(forward)
        for each in [*layers_of(forward.module), whole]:
            shard: Any = fully_shard(each, mesh=mesh.data, mp_policy=precision)
            assert isinstance(shard, FSDPModule)
            shard.set_gradient_divide_factor(1.0)  # the loss is divided by the whole step's tokens already
            shard.set_force_sum_reduction_for_comms(True)
        forward._device = device  # type: ignore[attr-defined]
        self._whole = whole

    def computed(self, packed: TokenTree, left_T: SamplingMask | None, wanted: Collection[str]) -> dict[str, Tensor]:
        """As the forward's."""
        found: dict[str, Tensor] = self._whole(packed, left_T, wanted)
        return found


class _Whole(nn.Module):
    """The root that gathers what no layer has: whatever of the model a forward reads, it reads in here."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.module = forward.module
        self._computed = forward.computed

    def forward(self, packed: TokenTree, left_T: SamplingMask | None, wanted: Collection[str]) -> dict[str, Tensor]:
        return self._computed(packed, left_T, wanted)


def shard(learner: Learner, mesh: TrainerMesh, compute: torch.dtype | None, device: torch.device, name: str) -> None:
    """Turn a learner of a whole model in main memory, which has made no step, into that of one rank on `device`.

    Raises ModelError for a model that cannot be shared out.
    """
    forward = learner.forward
    if not getattr(forward, "packs", True):
        raise ModelError(
            f"model '{name}' cannot be trained on several ranks: {type(forward.module).__name__} keeps its own "
            f"attention, which is called once for each length, and ranks must be called alike; train it on one rank"
        )
    before = {id(weight): at for at, weight in forward.module.named_parameters()}
    if mesh["tp"].size() > 1:
        cut(forward.module, mesh, name)
    learner.forward = Sharded(forward, mesh, compute, device)
    learner.together = MeshTogether(mesh)
    after = dict(forward.module.named_parameters())
    for group in learner.optimizer.param_groups:
        group["params"] = [after[before[id(weight)]] for weight in group["params"]]
    learner.parameters = {at: weight for at, weight in after.items() if weight.requires_grad}


def layers_of(module: Any) -> list[nn.Module]:
    """The layers that transformers would not split; none where it does not say."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    return [each for each in module.modules() if type(each).__name__ in names]


def cut(module: Any, mesh: TrainerMesh, name: str) -> None:
    """Leave in each layer of `module` this rank's slices of its matrices; the ends of the model stay whole.

    The losses read log-probabilities from the head's weight directly, so it is not cut; FSDP shards it all the same.
    Raises ModelError as `heads_of`, and where an adapted layer is cut in a way that its adapters cannot be.
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
    """A plan by the names of modules and parameters; what it says of a module holds for its parameters too.

    Of an adapted layer it holds for the layer inside, and for that adapter that has the dimension which is cut.
    """
    found: dict[str, str] = {}
    for name, each in module.named_modules():
        style = plan.get(place_of(name))
        if style is not None and adapters.is_adapted_layer(each):
            for part in adapters.parts_cut(name, style):
                found |= {part: style} | {
                    f"{part}.{leaf}": style for leaf, _ in module.get_submodule(part).named_parameters()
                }
            continue
        if style is not None:
            found[name] = style
        for leaf, _ in each.named_parameters(recurse=False):
            own = plan.get(place_of(f"{name}.{leaf}"), style)
            if own is not None:
                found[f"{name}.{leaf}"] = own
    return found
