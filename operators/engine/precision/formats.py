"""Formats of quantised numbers: floats to values of 8 bits with scales, and back.

A matrix [..., rows, columns] has a float32 scale per row and group of columns, [..., rows, groups];
symmetric, so that number = value * scale and the largest number of a group is the largest value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

Weights = Literal["int8", "int8_dynamic", "fp8"]
"""How a linear layer multiplies; see `FORMATS`."""

SLICE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Numbers quantised at once: what keeps the float32 copies of a slice in a processor's cache, or a
GPU busy."""

Largest = Callable[[torch.Tensor], object]
"""Replaces numbers by the largest that any of the ranks with parts of the same rows has; all of
them call it together. As int32 the bits of magnitudes are ordered as these are, and what is no
number is above all that are."""

TINY = torch.finfo(torch.float32).tiny
"""Least scale: rows of zeros become zeros."""


@dataclass(frozen=True)
class Format:
    """A dtype of 8 bits, and whether a layer's inputs are brought into it too."""

    dtype: torch.dtype
    """Of the values."""
    top: float
    """The largest value."""
    inputs: bool
    """Inputs are quantised for each token on the fly, so that the product runs on that dtype
    itself."""


FORMATS: dict[str, Format] = {
    "int8": Format(torch.int8, 127.0, inputs=False),
    "int8_dynamic": Format(torch.int8, 127.0, inputs=True),
    "fp8": Format(torch.float8_e4m3fn, 448.0, inputs=True),
}


@torch.no_grad()
def pack(
    numbers: torch.Tensor,
    form: Format,
    values: torch.Tensor,
    scale: torch.Tensor,
    largest: Largest | None = None,
) -> None:
    """Quantise `numbers` [..., rows, columns] into `values` (same shape) and `scale` [..., rows,
    groups], in place.

    Scales are numbers of the dtype of `numbers` where that has float32's range, so that a product
    may take them in that dtype. At most a slice is held in float32. A group with a number that is
    not finite gets such a scale. largest: where the rows are cut, and these are parts of them; the
    scales are those of whole rows.
    """
    columns, groups = values.shape[-1], scale.shape[-1]
    into, scales = values.view(-1, columns), scale.view(-1, groups)
    coarse = numbers.dtype is torch.bfloat16
    if largest is not None:
        for low, block in _slices(numbers, values, groups):
            scales[low : low + len(block)] = block.abs().amax(-1)
        largest(scale.view(torch.int32))
    for low, block in _slices(numbers, values, groups):
        high = low + len(block)
        fine = block.abs().amax(-1, keepdim=True) if largest is None else scales[low:high, :, None]
        # By a tensor, as in the trainer's encoder: both round alike on every device.
        fine = (fine / torch.full((), form.top, device=fine.device)).clamp_(min=TINY)
        if coarse:
            fine = fine.bfloat16().float()
        into[low:high] = _rounded(block / fine, form).view(-1, columns)
        scales[low:high] = fine[..., 0]


def _slices(
    numbers: torch.Tensor, beside: torch.Tensor, groups: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows [n, groups, columns / groups] in float32 on the device of `beside`), slice
    by slice.
    """
    columns = numbers.shape[-1]
    rows = numbers.reshape(-1, columns)
    step = max(1, SLICE.get(beside.device.type, 1 << 26) // columns)
    for low in range(0, len(rows), step):
        yield (
            low,
            rows[low : low + step]
            .to(beside.device, torch.float32)
            .view(-1, groups, columns // groups),
        )


def unpack(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [..., rows, columns] that `values` and `scale` [..., rows, groups] stand for,
    rounded to `dtype`.
    """
    grouped = values.float().view(*scale.shape, values.shape[-1] // scale.shape[-1])
    return grouped.mul_(scale[..., None]).view(values.shape).to(dtype)


def per_token(inputs: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [n, columns] as values of the format [n, columns] and a float32 scale for each token
    [n, 1].
    """
    exact = inputs.float()
    scale = (exact.abs().amax(-1, keepdim=True) / form.top).clamp_(min=TINY)
    return _rounded(exact / scale, form), scale


def _rounded(scaled: torch.Tensor, form: Format) -> torch.Tensor:
    """Round to the nearest value of the format; `scaled` is overwritten."""
    scaled.clamp_(-form.top, form.top)
    return (scaled if form.dtype.is_floating_point else scaled.round_()).to(form.dtype)
