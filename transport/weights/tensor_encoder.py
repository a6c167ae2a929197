"""Makes what travels out of a trainer's tensors, into memory that is taken once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from transport.weights.encoding import QUANTIZED, SCALE, Encoding
from transport.weights.errors import LayoutMismatch
from transport.weights.layout.flat import ITEM_BYTES
from transport.weights.layout.layout import Layout, TensorLayout

SLICE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Numbers quantized at once: what keeps the float32 copies of a slice in a processor's cache, or a
GPU busy."""

TINY = torch.finfo(torch.float32).tiny
"""Least scale: rows of zeros become zeros."""


@dataclass(frozen=True)
class QuantizeJob:
    """A tensor to be quantized."""

    names: tuple[str, ...]
    """Under which it may be published: its own, then those tied to it."""
    values: torch.Tensor
    scale: torch.Tensor
    top: float
    through: torch.dtype
    """The dtype it is cast to first."""

    @classmethod
    def of(cls, names: tuple[str, ...], full: torch.Tensor, encoding: Encoding) -> QuantizeJob:
        """Takes the memory of its values and scales, on the device of the full tensor."""
        assert encoding.quantized is not None, "the encoding quantizes it"
        form = QUANTIZED[encoding.quantized]
        values = torch.empty(full.shape, dtype=getattr(torch, form.dtype), device=full.device)
        scale = torch.empty((*full.shape[:-1], 1), device=full.device)
        through = getattr(torch, encoding.dtype) if encoding.dtype else full.dtype
        return cls(names, values, scale, form.top, through)

    def quantize(self, numbers: torch.Tensor, largest: torch.Tensor | None = None) -> None:
        quantize(
            numbers, self.values, self.scale, top=self.top, through=self.through, largest=largest
        )


def _jobs_of(
    encoding: Encoding, travels: Layout, rank: int, tensors: Mapping[str, torch.Tensor]
) -> list[QuantizeJob]:
    """What a rank is to quantize of its tensors."""
    names = travels.local(rank)
    return [
        QuantizeJob.of(
            (name, *(alias for alias, of in travels.aliases.items() if of == name)),
            tensors[name],
            encoding,
        )
        for name in names
        if name + SCALE in names
    ]


def _taken(job: QuantizeJob, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a job is to quantize, which leaves `tensors` under all of its names."""
    sources = [tensors.pop(name) for name in job.names if name in tensors]
    shape = list(sources[0].shape) if sources else "no such tensor"
    if shape != list(job.values.shape):
        raise LayoutMismatch(
            f"'{job.names[0]}' cannot be quantized; found {shape}, not {list(job.values.shape)}; "
            "publish the tensors that the encoder was made for"
        )
    return sources[0]


@torch.no_grad()
def quantize(
    numbers: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    *,
    top: float,
    through: torch.dtype,
    largest: torch.Tensor | None = None,
) -> None:
    """Round `numbers` [..., rows, columns] to `values` (same shape) times `scale` float32 [...,
    rows, 1], in place.

    They are cast to `through` first; where that is bfloat16, scales are numbers of bfloat16 too, so
    that a product may take them in that dtype. At most a slice is held in float32. A row that is
    not finite gets such a scale. `largest`: as `magnitudes`, shaped as `scale` (or `scale` itself),
    of rows of which these are parts.
    """
    into, scales = values.view(-1, values.shape[-1]), scale.view(-1, 1)
    maxima = None if largest is None else largest.view(-1, 1)
    for low, block in _slices(numbers, values, through):
        high = low + len(block)
        fine = block.abs().amax(-1, keepdim=True) if maxima is None else maxima[low:high]
        # By a number of Python's a GPU multiplies its reciprocal, which rounds otherwise than a
        # processor divides.
        fine = (fine / torch.full((), top, device=fine.device)).clamp_(min=TINY)
        if through is torch.bfloat16:
            fine = fine.bfloat16().float()
        block = (block / fine).clamp_(-top, top)
        into[low:high] = block if values.dtype.is_floating_point else block.round_()
        scales[low:high] = fine


@torch.no_grad()
def magnitudes(numbers: torch.Tensor, largest: torch.Tensor, *, through: torch.dtype) -> None:
    """The largest magnitude of each row of `numbers` [..., rows, columns], cast to `through`, into
    `largest` float32 [..., rows, 1].
    """
    into = largest.view(-1, 1)
    for low, block in _slices(numbers, largest, through):
        into[low : low + len(block)] = block.abs().amax(-1, keepdim=True)


def _slices(
    numbers: torch.Tensor, beside: torch.Tensor, through: torch.dtype
) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows in float32 on the device of `beside`), slice by slice; callers may not write
    into them.
    """
    columns = numbers.shape[-1]
    rows = numbers.reshape(-1, columns)
    step = max(1, SLICE.get(beside.device.type, 1 << 26) // max(1, columns))
    for low in range(0, len(rows), step):
        yield low, rows[low : low + step].to(through).to(beside.device, torch.float32)


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


class Encoder:
    """Encodes the versions of a model of which this rank holds all, or parts.

    What travels from several ranks is bit for bit what travels from one that holds the whole. Where
    rows (the last dimension) are cut, the ranks agree on the largest magnitude of each, by one
    exchange per version of 4 bytes a row; all ranks encode the same versions in the same order.
    Where no row is cut there is no exchange.
    """

    full_share = 1.0
    """How many times as many bytes a version would have if none of its tensors were quantized."""

    def __init__(
        self,
        encoding: Encoding,
        full: Layout,
        rank: int,
        local: Mapping[str, torch.Tensor],
        agree: Agree | None = None,
    ) -> None:
        """`full`: of all ranks, before it is encoded. `local`: this rank's local tensors, of whose
        shapes, dtypes and devices every version is. `agree`: where there are other ranks.

        Takes the memory of the quantized tensors, on the devices of the full ones. LayoutMismatch
        as `Encoding.layout`.
        """
        self.layout = encoding.layout(full)
        """What travels."""
        if encoding.quantized is not None:
            self.full_share = _nbytes(encoding.unquantized.layout(full)) / _nbytes(self.layout)
        self._jobs = _jobs_of(encoding, self.layout, rank, local)
        self._agree = agree
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
        self._device = next((tensor.device for tensor in local.values()), None)

    def encode(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A version as it travels: the quantized tensors in this encoder's own memory, until the
        next version, and the others as they are; they are cast when they are copied into a buffer
        of `layout`.

        LayoutMismatch when a tensor that is to be quantized is missing, or has another shape.
        """
        travelling = dict(tensors)
        self._quantize([_taken(job, travelling) for job in self._jobs])
        for job in self._jobs:
            travelling[job.names[0]], travelling[job.names[0] + SCALE] = job.values, job.scale
        return travelling

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
            assert self._agree is not None, "who holds parts of rows is not alone"
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
