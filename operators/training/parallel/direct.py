"""How FSDP2's ranks exchange parameters and gradients over gloo: from where they lie to where they
stay; imports torch.

gloo's own collectives copy what they are given, as much again for every layer, and its
reduce-scatter sends all ranks everything. Here each rank sends each other one its part, out of the
tensor that FSDP2 has, and takes theirs in.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUFFER_BYTES = 8 << 20
"""Of gradients that have come from other ranks and are not added up yet."""
_NEVER = datetime.timedelta(days=365)
"""`operators.ranks.watch` bounds all waits: gloo's own time-out runs on while the run is
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
