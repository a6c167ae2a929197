"""Makes what travels out of a trainer's tensors, into memory that is taken once, and turns it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from transport.weights.encoding import QUANTIZED, SCALE, Encoding
from transport.weights.errors import LayoutMismatch

SLICE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Numbers quantized at once: what keeps the float32 copies of a slice in a processor's cache, or a GPU busy."""

TINY = torch.finfo(torch.float32).tiny
"""Least scale: rows of zeros become zeros."""


@dataclass(frozen=True)
class _Job:
    """A tensor to be quantized."""

    names: tuple[str, ...]
    """Under which it may be published: its own, then those tied to it."""
    values: torch.Tensor
    scale: torch.Tensor
    top: float
    through: torch.dtype
    """The dtype it is cast to first."""


class Encoder:
    """Encodes the versions of one model's tensors."""

    def __init__(self, encoding: Encoding, tensors: Mapping[str, torch.Tensor]) -> None:
        """`tensors`: the model's, of whose shapes, dtypes and devices every version is.

        Takes the memory of the quantized tensors, on the devices of the full ones. Raises as `flat_layout`."""
        self.layout = encoding.flat_layout(tensors)
        """What travels."""
        self._jobs: list[_Job] = []
        if encoding.quantized is None:
            return
        form = QUANTIZED[encoding.quantized]
        for spec in self.layout.tensors:
            if spec.name in tensors and encoding.quantizes(spec.name, spec.shape, _dtype(tensors[spec.name])):
                full = tensors[spec.name]
                tied = (alias for alias, name in self.layout.aliases.items() if name == spec.name)
                values = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=full.device)
                scale = torch.empty((*spec.shape[:-1], 1), device=full.device)
                through = getattr(torch, encoding.dtype) if encoding.dtype else full.dtype
                self._jobs.append(_Job((spec.name, *tied), values, scale, form.top, through))

    def encode(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A version as it travels: the quantized tensors in this encoder's own memory, until the next version, and
        the others as they are; they are cast when they are copied into a buffer of `layout`.

        LayoutMismatch when a tensor that is to be quantized is missing, or has another shape."""
        travelling = dict(tensors)
        for job in self._jobs:
            tied = [travelling.pop(name) for name in job.names if name in travelling]
            found = list(tied[0].shape) if tied else "no such tensor"
            if found != list(job.values.shape):
                raise LayoutMismatch(
                    f"'{job.names[0]}' cannot be quantized; found {found}, not {list(job.values.shape)}; "
                    "publish the tensors that the encoder was made for"
                )
            quantize(tied[0], job.values, job.scale, top=job.top, through=job.through)
            travelling[job.names[0]], travelling[job.names[0] + SCALE] = job.values, job.scale
        return travelling


class EncodedWriter:
    """A writer that is given full tensors and publishes them encoded; in all else it is that writer."""

    def __init__(self, writer: Any, encoder: Encoder) -> None:
        """`writer`: a WeightWriter, made with the layout of `encoder`."""
        self._writer, self._encoder = writer, encoder

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        """As the writer's; quantized tensors are read now, even where the version goes out later."""
        sent: bool = self._writer.publish(version, self._encoder.encode(tensors))
        return sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


@torch.no_grad()
def quantize(
    numbers: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, *, top: float, through: torch.dtype
) -> None:
    """Round `numbers` [..., rows, columns] to `values` (same shape) times `scale` float32 [..., rows, 1], in place.

    They are cast to `through` first; where that is bfloat16, scales are numbers of bfloat16 too, so that a product
    may take them in that dtype. At most a slice is held in float32. A row that is not finite gets such a scale."""
    columns = values.shape[-1]
    from_, into, scales = numbers.reshape(-1, columns), values.view(-1, columns), scale.view(-1, 1)
    step = max(1, SLICE.get(values.device.type, 1 << 26) // max(1, columns))
    for low in range(0, len(into), step):
        block = from_[low : low + step].to(through).to(values.device, torch.float32)
        fine = (block.abs().amax(-1, keepdim=True) / top).clamp_(min=TINY)
        if through is torch.bfloat16:
            fine = fine.bfloat16().float()
        block = (block / fine).clamp_(-top, top)
        into[low : low + step] = block if values.dtype.is_floating_point else block.round_()
        scales[low : low + step] = fine


@torch.no_grad()
def decode(travelled: Mapping[str, torch.Tensor], destinations: Mapping[str, torch.Tensor]) -> None:
    """Fill `destinations` with the numbers, rounded to their dtypes, that tensors under the same names stand for.

    KeyError where one of them has not travelled."""
    for name, into in destinations.items():
        found, scale = travelled[name], travelled.get(name + SCALE)
        into.copy_(found if scale is None else found.float().mul_(scale))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
