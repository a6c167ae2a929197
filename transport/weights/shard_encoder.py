"""Encodes one rank's shards of a model as one rank would encode the whole of it: scales are of
whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from transport.weights.encoding import SCALE, Encoding
from transport.weights.errors import LayoutMismatch
from transport.weights.layout.flat import ITEM_BYTES
from transport.weights.layout.layout import Layout, TensorLayout
from transport.weights.tensor_encoder import BaseEncoder, QuantizeJob, jobs_of, magnitudes

Agree = Callable[[torch.Tensor], object]
"""Replaces numbers, int32[n], by the largest that any rank has at their places; all ranks call it
together."""

Box = tuple[slice, ...]


@dataclass(frozen=True)
class _CutRows:
    """Rows of which this rank holds parts."""

    job: QuantizeJob
    first: int
    """Where the rows of the full tensor begin among all that are agreed on."""
    shape: tuple[int, ...]
    """[..., rows, 1] of the full tensor."""
    boxes: tuple[tuple[Box, Box], ...]
    """(among the full tensor's, among the local one's) of this rank's rows."""

    def pairs(self, agreed: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(where they are agreed on, their scales) as int32."""
        shared = agreed[self.first : self.first + math.prod(self.shape)].view(self.shape)
        return [
            (shared[outer], self.job.scale.view(torch.int32)[inner]) for outer, inner in self.boxes
        ]


class ShardEncoder(BaseEncoder):
    """Encodes the local tensors of one of the ranks that hold a model.

    What travels is bit for bit what `Encoder` makes of whole tensors. Where rows (the last
    dimension) are cut, the ranks agree on the largest magnitude of each, by one exchange per
    version of 4 bytes a row; all ranks encode the same versions in the same order. Where no row is
    cut there is no exchange.
    """

    def __init__(
        self,
        encoding: Encoding,
        full: Layout,
        rank: int,
        local: Mapping[str, torch.Tensor],
        agree: Agree,
    ) -> None:
        """`full`: of all ranks, before it is encoded. `local`: this rank's local tensors, on one
        device.

        Takes the memory of its quantized tensors. LayoutMismatch as `Encoding.layout`.
        """
        self.layout = encoding.layout(full)
        """What travels."""
        if encoding.quantized is not None:
            self.full_share = _nbytes(encoding.unquantized.layout(full)) / _nbytes(self.layout)
        super().__init__(jobs_of(encoding, self.layout.local(rank), self.layout.aliases, local))
        self._agree, self._device = agree, next(iter(local.values())).device
        jobs = {job.names[0]: job for job in self._jobs}
        self._cut: dict[str, _CutRows] = {}
        self._rows = 0
        for name, tensor in full.tensors.items():
            scale = self.layout.tensors.get(name + SCALE)
            if scale is None or not tensor.shards.cuts_rows(tensor.shape[-1]):
                continue
            if name in jobs:
                self._cut[name] = _CutRows(jobs[name], self._rows, scale.shape, _boxes(scale, rank))
            self._rows += math.prod(scale.shape)

    @torch.no_grad()
    def _quantize(self, full: Sequence[torch.Tensor]) -> None:
        """Each tensor by its job, with scales that are agreed on where rows are cut.

        As int32 the bits of magnitudes are ordered as these are, and what is no number is above all
        that are.
        """
        agreed = torch.zeros(self._rows, dtype=torch.int32, device=self._device)
        for job, numbers in zip(self._jobs, full, strict=True):
            if job.names[0] in self._cut:
                magnitudes(numbers, job.scale, through=job.through)
                for shared, own in self._cut[job.names[0]].pairs(agreed):
                    shared.copy_(own)
        if self._rows:
            self._agree(agreed)
        for job, numbers in zip(self._jobs, full, strict=True):
            cut = self._cut.get(job.names[0])
            for shared, own in cut.pairs(agreed) if cut else ():
                own.copy_(shared)
            job.quantize(numbers, job.scale if cut else None)


def _nbytes(layout: Layout) -> int:
    """Of all tensors, each once."""
    return sum(
        math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in layout.tensors.values()
    )


def _boxes(scale: TensorLayout, rank: int) -> tuple[tuple[Box, Box], ...]:
    """A rank's rows, in the full tensor and in its own.

    LayoutMismatch where a row of its own is none of the full one's, or made of parts of several.
    """
    shards = scale.shards
    own = shards.ranks == rank
    start, size, at = shards.start[own], (shards.stop - shards.start)[own], shards.local_start[own]
    if (own_rows := int(size.prod(axis=1).sum())) != (
        local := math.prod(shards.local_shape[own][0].tolist())
    ):
        raise LayoutMismatch(
            f"'{scale.name.removesuffix(SCALE)}' cannot be quantized on rank {rank}; found {local}"
            f" rows in its local tensor for {own_rows} of the full one; let each local row hold"
            " parts"
            " of one row alone"
        )
    outer, inner = (
        [_box(*pair) for pair in zip(low.tolist(), size.tolist(), strict=True)]
        for low in (start, at)
    )
    return tuple(zip(outer, inner, strict=True))


def _box(start: Sequence[int], size: Sequence[int]) -> Box:
    return tuple(slice(low, low + length) for low, length in zip(start, size, strict=True))
