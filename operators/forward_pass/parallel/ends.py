"""The ends of a forward operator's model: each rank keeps some rows of embedding and head, and
gathers the others while the layer computes; imports torch.

So a rank holds its share of the model and one layer more, and computes what one rank computes, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from operators.training.parallel.shard import LayerBuffer, swap


def cut_ends(module: Any, ranks: DeviceMesh) -> list[tuple[nn.Module, int]]:
    """Leave this rank its rows of the embedding and of the layer that gives logits, as DTensors;
    these layers, and how many rows each has on all ranks.

    One that has fewer rows than every rank needs for one stays whole. Weights that both share they
    still share.
    """
    cut: dict[int, nn.Parameter] = {}
    ends: list[tuple[nn.Module, int]] = []
    for layer in (module.get_input_embeddings(), module.get_output_embeddings()):
        weight = getattr(layer, "weight", None)
        if not isinstance(layer, nn.Embedding | nn.Linear) or not isinstance(weight, nn.Parameter):
            continue
        if isinstance(weight, DTensor) or len(_parts(weight, ranks.size())) < ranks.size():
            continue
        if id(weight) not in cut:
            cut[id(weight)] = nn.Parameter(_rows(weight, ranks), requires_grad=False)
        layer.weight = cut[id(weight)]
        ends.append((layer, len(weight)))
    return ends


def gather_ends(layers: Sequence[tuple[nn.Module, int]], ranks: DeviceMesh) -> None:
    """Have what `cut_ends` found, whose weights are plain local tensors by now, compute with the
    rows of all ranks, which call each layer together.
    """
    group, buffer = ranks.get_group(), LayerBuffer()
    for layer, rows in layers:
        gathering = _Gathering(rows, group, buffer)
        layer.register_forward_pre_hook(gathering.gather)
        layer.register_forward_hook(gathering.give_back, always_call=True)


class _Gathering:
    """Around each call of one layer."""

    def __init__(self, rows: int, group: dist.ProcessGroup, buffer: LayerBuffer) -> None:
        self._rows, self._group, self._buffer = rows, group, buffer
        self._own: nn.Parameter | None = None
        """This rank's rows, while it has those of all."""

    @torch.no_grad()
    def gather(self, layer: nn.Module, inputs: object) -> None:
        """Before the layer computes."""
        own = layer.get_parameter("weight")
        size = (self._rows, *own.shape[1:])
        whole = (
            self._buffer.take(size, own.dtype) if own.device.type == "cpu" else own.new_empty(size)
        )
        parts = _parts(whole, self._group.size())
        if own.device.type == "cpu":
            parts[self._group.rank()].copy_(own)
            swap(self._group, lambda far: own.data, lambda far: parts[far])
        else:
            dist.all_gather(list(parts), own.data, group=self._group)
        self._own, layer._parameters["weight"] = own, nn.Parameter(whole, requires_grad=False)

    def give_back(self, layer: nn.Module, inputs: object, output: object) -> None:
        """When it has."""
        if self._own is not None:
            layer._parameters["weight"], self._own = self._own, None


def _parts(weight: Tensor, ranks: int) -> tuple[Tensor, ...]:
    """The rows of each rank, as DTensor deals them out."""
    return torch.chunk(weight.detach(), ranks)


def _rows(weight: Tensor, ranks: DeviceMesh) -> DTensor:
    """This rank's, in memory of their own."""
    dealt = distribute_tensor(weight.detach(), ranks, [Shard(0)], src_data_rank=None)
    if weight.is_meta:
        return dealt
    return DTensor.from_local(
        dealt.to_local().clone(),
        ranks,
        [Shard(0)],
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
