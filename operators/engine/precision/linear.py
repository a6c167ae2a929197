"""A linear layer, and the experts of a mixture, whose weights are quantised.

Axes: n tokens, out and in features.

A matrix [..., rows, columns] has a float32 scale per row, [..., rows, 1]; symmetric, so that number
= value * scale and the largest number of a row is the largest value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

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
    1], in place.

    Scales are numbers of the dtype of `numbers` where that has float32's range, so that a product
    may take them in that dtype. At most a slice is held in float32. A row with a number that is not
    finite gets such a scale. largest: where the rows are cut, and these are parts of them; the
    scales are those of whole rows.
    """
    into, scales = values.view(-1, values.shape[-1]), scale.view(-1, 1)
    coarse = numbers.dtype is torch.bfloat16
    if largest is not None:
        for low, block in _slices(numbers, values):
            scales[low : low + len(block)] = block.abs().amax(-1, keepdim=True)
        largest(scale.view(torch.int32))
    for low, block in _slices(numbers, values):
        high = low + len(block)
        fine = block.abs().amax(-1, keepdim=True) if largest is None else scales[low:high]
        # By a tensor, as in the trainer's encoder: both round alike on every device.
        fine = (fine / torch.full((), form.top, device=fine.device)).clamp_(min=TINY)
        if coarse:
            fine = fine.bfloat16().float()
        into[low:high] = _rounded(block / fine, form)
        scales[low:high] = fine


def _slices(numbers: torch.Tensor, beside: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows [n, columns] in float32 on the device of `beside`), slice by slice."""
    rows = numbers.reshape(-1, numbers.shape[-1])
    step = max(1, SLICE.get(beside.device.type, 1 << 26) // rows.shape[-1])
    for low in range(0, len(rows), step):
        yield low, rows[low : low + step].to(beside.device, torch.float32)


def unpack(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [..., rows, columns] that `values` and `scale` [..., rows, 1] stand for, rounded
    to `dtype`.
    """
    return values.float().mul_(scale).to(dtype)


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


FEW_ROWS = 8
"""Tokens up to which torch's int8 product for bfloat16 on the CPU is faster than its bfloat16
product (measured)."""

FEW_ROWS_FEATURES = 64
"""That product reads inputs in whole vectors, beyond their end too: features in must be a multiple
of this."""

LEAST_INT_ROWS = 32
"""Tokens that the int8 product of a GPU needs; fewer are padded with zeros."""


class QuantisedLinear(torch.nn.Linear):
    """`linear` with values and scales in place of its weight: buffers `weight` [out, in] and
    `scale` float32 [out, 1].

    Its bias stays the parameter that it was. There is no parameter of a quantised dtype. Where
    ranks share out the layer, buffers, inputs and outputs are this rank's, and `in_features` and
    `out_features` those of all together.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.nn.Parameter | None  # type: ignore[assignment]
    rounds: bool
    """Whether inputs are brought into the format."""

    def __init__(
        self, linear: torch.nn.Linear, form: Format, largest: Largest | None = None
    ) -> None:
        """Quantise what `linear` holds now. largest: as for `pack`."""
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.form = (
            linear.in_features,
            linear.out_features,
            form,
        )
        self.rounds, self._largest = form.inputs, largest
        device = linear.weight.device
        self.register_buffer("weight", _place(linear.weight.shape, form.dtype, device))
        self.register_buffer("scale", _place((len(linear.weight), 1), torch.float32, device))
        self.register_parameter("bias", linear.bias)
        self.take(linear.weight)

    def take(self, weight: torch.Tensor) -> None:
        """Quantise `weight` [out, in], of any floating dtype and device, into the buffers."""
        pack(weight, self.form, self.weight, self.scale, self._largest)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out], in the dtype of `input`."""
        rows = input.reshape(-1, input.shape[-1])
        product = _quantised_product if self.rounds else _product
        return product(rows, self).view(*input.shape[:-1], len(self.weight))

    def extra_repr(self) -> str:
        """What printing the model shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, {self.form.dtype}"
        )


class QuantisedExperts(torch.nn.Module):
    """The weights [E, ..., ...] of a layer's experts; indexing dequantises the chosen ones."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, experts: torch.Tensor, form: Format, largest: Largest | None = None) -> None:
        """Quantise `experts`, with a scale per row. largest: as for `pack`."""
        super().__init__()
        self.form, self.dtype, self._largest = form, experts.dtype, largest
        self.register_buffer("weight", _place(experts.shape, form.dtype, experts.device))
        self.register_buffer(
            "scale", _place((*experts.shape[:-1], 1), torch.float32, experts.device)
        )
        self.take(experts)

    def take(self, weight: torch.Tensor) -> None:
        """Quantise `weight`, shaped as the experts, into the buffers."""
        pack(weight, self.form, self.weight, self.scale, self._largest)

    def __getitem__(self, expert: torch.Tensor | int) -> torch.Tensor:
        """The weights of one expert, or of several, in the model's dtype."""
        return unpack(self.weight[expert], self.scale[expert], self.dtype)


@contextmanager
def unrounded(model: torch.nn.Module) -> Iterator[None]:
    """Let the layers of `model` multiply inputs as they are, whatever their format.

    Rounding turns differences in the last bit into whole steps, as large as what a wrong cache
    might do: what judges anything but the rounding itself leaves it out.
    """
    layers = [
        layer for layer in model.modules() if isinstance(layer, QuantisedLinear) and layer.rounds
    ]
    for layer in layers:
        layer.rounds = False
    try:
        yield
    finally:
        for layer in layers:
            layer.rounds = True


def _place(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    """Memory of a buffer. It is a Parameter, though not one of the module's: a weight reader makes
    those views.
    """
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def _product(x: torch.Tensor, layer: QuantisedLinear) -> torch.Tensor:
    """x [n, in] times dequantised weights, plus bias: inputs stay as they are."""
    if layer.form.inputs or x.dtype is torch.float16:
        return F.linear(x, unpack(layer.weight, layer.scale, x.dtype), layer.bias)
    scale = layer.scale[:, 0].to(x.dtype)
    few = len(x) <= FEW_ROWS and x.shape[1] % FEW_ROWS_FEATURES == 0
    if few and x.dtype is torch.bfloat16 and x.device.type == "cpu":
        out: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, layer.weight, scale)
    else:
        out = F.linear(x, layer.weight.to(x.dtype)).mul_(scale)
    return out if layer.bias is None else out.add_(layer.bias)


def _quantised_product(x: torch.Tensor, layer: QuantisedLinear) -> torch.Tensor:
    """x [n, in], quantised for each token, times the weights as they are stored, plus bias.

    Where ranks share out the inputs each has a scale for its part of a token, no coarser than the
    whole token's.
    """
    values, tokens = per_token(x, layer.form)
    if layer.form.dtype is torch.int8:
        out = _integers(values, layer.weight).mul_(tokens).mul_(layer.scale[:, 0])
    elif _scaled_mm_takes(x, layer):
        product = torch._scaled_mm(
            values, layer.weight.t(), tokens, layer.scale.t(), out_dtype=torch.bfloat16
        )
        out = product.float()
    else:
        out = F.linear(values.float(), layer.weight.float()).mul_(tokens).mul_(layer.scale[:, 0])
    return (out if layer.bias is None else out.add_(layer.bias)).to(x.dtype)


def _integers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product of int8 x [n, in] and int8 weight [out, in] in float32 [n, out]."""
    if x.device.type == "cpu":
        if _multiplies_integers():
            return torch._int_mm(x, weight.t()).float()
        return F.linear(x.float(), weight.float())
    if x.shape[1] % 8 or weight.shape[0] % 8:
        return F.linear(x.float(), weight.float())
    padded = F.pad(x, (0, 0, 0, max(0, LEAST_INT_ROWS - len(x))))
    return torch._int_mm(padded, weight.t())[: len(x)].float()


@functools.cache
def _multiplies_integers() -> bool:
    """Whether this processor multiplies int8 fast, and the library exactly: limited to AVX2
    (`ONEDNN_MAX_CPU_ISA`) on a processor with VNNI, oneDNN adds pairs of products in 16 bits, which
    saturate.
    """
    if not torch.cpu._is_vnni_supported():
        return False
    x, weight = (torch.full((17, 64), 127, dtype=torch.int8) for _ in range(2))
    x[1::2] = -127
    return torch.equal(torch._int_mm(x, weight.t()), (x.int() @ weight.int().t()))


def _scaled_mm_takes(x: torch.Tensor, layer: QuantisedLinear) -> bool:
    """Whether the GPU multiplies these in fp8: 16 features at a time, bfloat16 out."""
    fits = all(size % 16 == 0 for size in layer.weight.shape)
    return x.device.type == "cuda" and fits and x.dtype is torch.bfloat16 and len(x) > 0
