"""Log-probabilities and entropies of chosen tokens from hidden states, a slice of the vocabulary at
a time; uses torch.

All logits at once are the largest tensor of a step: [U, V] in float32, and its gradient again. Here
they are computed for a slice of C ids at a time and reduced at once (a running maximum and sum of
exponentials). A part of the slices is kept for the backward pass, where its memory is given back
while the weight's gradient comes to take as much; the others are computed again.

The slices go over V and not over U, so that each part of the weight's gradient is written once,
with the sum over all U inside one matrix product: it needs no wider copy to add up in, and in
bfloat16 it is rounded once.

Axis suffixes as in `packing`; and D width of the model, V vocabulary, C ids of a slice, M tokens
drawn from less than the vocabulary, P pairs of a row and an id whose logit is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from operators.training.cpu.direct_gradients import DirectGradients
from operators.training.cpu.products import multiplies_bfloat16, rounded_product
from operators.training.learner.logprobs import Wanted, composed

CPU_SLICE, GPU_SLICE = 2**20, 2**25
"""Logits of a slice, U * C: on a CPU 4 MiB, which stay in its cache; on a GPU 128 MiB, enough for
its matrix units."""
LEAST_IDS = 512
"""Ids of a slice at least: narrower matrix products are slow."""
MOST_KEPT = 0.7
"""Share of the logits that is kept for the backward pass at most: it makes up for what is computed
twice."""
KEPT_OF_WEIGHT = 1.5
"""As many logits are kept at most as this times the weight has numbers."""
BLOCK = 2**23
"""Kept logits are allocated so many at a time, 32 MiB: smaller pieces the C library does not give
back when freed."""


@dataclass(frozen=True)
class Shape:
    """What happens to the product of hidden states and weight before it is a logit."""

    scale: float = 1.0
    """What it is multiplied by, after the cap."""
    cap: float | None = None
    """x becomes cap * tanh(x / cap)."""


def logprobs_of_hidden(
    hidden_U_D: Tensor,
    weight_V_D: Tensor,
    bias_V: Tensor | None,
    selection: Wanted,
    shape: Shape,
    *,
    entropy: bool,
    direct: DirectGradients | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [T] and, where asked for, entropies [T] in nats, differentiable in the
    first three.

    direct: writes the weight's gradient where it is kept, if it knows the weight.

    Products are computed in autocast's type where it is on, else in the weight's, and summed up in
    float32 (float64 for float64), which is the result's type too. shape: its scale holds the
    temperature.
    """
    rows_P, ids_P = selection.pairs()
    device = hidden_U_D.device.type
    compute = weight_V_D.dtype
    if torch.is_autocast_enabled(device) and compute != torch.float64:
        compute = torch.get_autocast_dtype(device)
    sums = _Slices.apply(  # type: ignore[no-untyped-call]
        hidden_U_D,
        weight_V_D,
        bias_V,
        rows_P,
        ids_P,
        shape,
        compute,
        entropy,
        torch.is_grad_enabled(),
        direct,
    )
    return composed(selection, *sums)


class _Slices(torch.autograd.Function):
    """Normaliser [U], logits of the pairs [P], and entropy [U] or None; walks over slices of the
    vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_U_D: Tensor,
        weight_V_D: Tensor,
        bias_V: Tensor | None,
        rows_P: Tensor,
        ids_P: Tensor,
        shape: Shape,
        compute: torch.dtype,
        entropy: bool,
        keep: bool,
        direct: DirectGradients | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One pass: a running maximum, and of exponentials below it their sum, and their sum times
        their exponents.
        """
        walk = _Walk(hidden_U_D, weight_V_D, bias_V, rows_P, ids_P, shape, compute)
        rows = len(hidden_U_D)
        most_U = walk.hidden_U_D.new_full((rows, 1), torch.finfo(walk.wide).min, dtype=walk.wide)
        sum_U, dot_U = torch.zeros_like(most_U), torch.zeros_like(most_U)
        picked_P = most_U.new_empty(len(rows_P))
        ctx.kept = walk.kept_rooms() if keep and any(ctx.needs_input_grad) else []
        spare = walk.spare() if entropy or ctx.kept else None
        for at, (start, end, picks) in enumerate(walk):
            is_kept = at < len(ctx.kept)
            logits_U_C, _ = walk.logits(start, end, ctx.kept[at] if is_kept else None)
            picked_P[picks] = logits_U_C[rows_P[picks], ids_P[picks] - start]
            before_U, most_U = most_U, most_U.maximum(logits_U_C.amax(1, keepdim=True))
            moved_U = before_U - most_U
            shrink_U = moved_U.exp()
            if spare is None or not (is_kept or entropy):
                powers_U_C = logits_U_C.sub_(most_U).exp_()
            else:
                powers_U_C = torch.sub(logits_U_C, most_U, out=walk.view(spare, start, end)).exp_()
            here_U = powers_U_C.sum(1, keepdim=True)
            if entropy:
                dot_U.add_(moved_U.mul_(sum_U)).mul_(shrink_U)
                dot_U += powers_U_C.mul_(logits_U_C).sum(1, keepdim=True) - most_U * here_U
            sum_U.mul_(shrink_U).add_(here_U)
        normalizer_U = (most_U + sum_U.log()).squeeze(1)
        entropy_U = (sum_U.log() - dot_U / sum_U).squeeze(1) if entropy else None
        ctx.save_for_backward(
            hidden_U_D, weight_V_D, bias_V, rows_P, ids_P, normalizer_U, entropy_U
        )
        ctx.shape, ctx.compute = shape, compute
        ctx.direct = (direct, weight_V_D) if direct is not None and weight_V_D in direct else None
        ctx.set_materialize_grads(False)
        return normalizer_U, picked_P, entropy_U

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        by_normalizer_U: Tensor | None,
        by_picked_P: Tensor | None,
        by_entropy_U: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """The same pass again, for softmax p of logits z with entropy H: p * (by_normalizer -
        by_entropy * (log p + H)) is the gradient of z, and that of the pairs besides.
        """
        hidden_U_D, weight_V_D, bias_V, rows_P, ids_P, normalizer_U, entropy_U = ctx.saved_tensors
        walk = _Walk(hidden_U_D, weight_V_D, bias_V, rows_P, ids_P, ctx.shape, ctx.compute)
        by_hidden, by_weight, by_bias = ctx.needs_input_grad[:3]
        grad_U_D = (
            walk.hidden_U_D.new_zeros(hidden_U_D.shape, dtype=walk.wide) if by_hidden else None
        )
        grad_V_D, is_added = None, False
        if by_weight and ctx.direct is not None:
            grad_V_D, is_added = ctx.direct[0].place(ctx.direct[1])
        elif by_weight:
            grad_V_D = torch.empty_like(weight_V_D)
        grad_V = torch.empty_like(bias_V) if bias_V is not None and by_bias else None
        scale = ctx.shape.scale
        by_normalizer_U = (
            torch.zeros_like(normalizer_U) if by_normalizer_U is None else by_normalizer_U * scale
        )
        by_entropy_U = None if by_entropy_U is None else by_entropy_U * scale
        by_picked_P = None if by_picked_P is None else by_picked_P * scale
        spare = walk.spare() if by_entropy_U is not None else None
        blocks, ctx.kept = ctx.kept, []
        for start, end, picks in walk:
            if blocks:
                logits_U_C, weight_C_D = (
                    walk.view(blocks.pop(0), start, end),
                    walk.weight(start, end),
                )
            else:
                logits_U_C, weight_C_D = walk.logits(start, end)
            slope_U_C = walk.slope(logits_U_C)
            logits_U_C.sub_(normalizer_U[:, None])
            if by_entropy_U is None or spare is None:
                grad_U_C = logits_U_C.exp_().mul_(by_normalizer_U[:, None])
            else:
                grad_U_C = torch.exp(logits_U_C, out=walk.view(spare, start, end))
                logits_U_C.add_(entropy_U[:, None]).mul_(-by_entropy_U[:, None])
                grad_U_C.mul_(logits_U_C.add_(by_normalizer_U[:, None]))
            if by_picked_P is not None:
                grad_U_C.index_put_(
                    (rows_P[picks], ids_P[picks] - start), by_picked_P[picks], accumulate=True
                )
            if slope_U_C is not None:
                grad_U_C.mul_(slope_U_C)
            narrow_U_C = grad_U_C.to(walk.kept_as)
            if grad_V_D is not None:
                walk.product(
                    narrow_U_C.t(), walk.hidden_U_D, out=grad_V_D[start:end], added=is_added
                )
            if grad_V is not None:
                grad_V[start:end] = grad_U_C.sum(0)
            if grad_U_D is not None:
                walk.product(narrow_U_C, weight_C_D, out=grad_U_D, added=True)
        grad_hidden = None if grad_U_D is None else grad_U_D.to(hidden_U_D.dtype)
        return (
            grad_hidden,
            None if ctx.direct else grad_V_D,
            grad_V,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
        )


class _Walk:
    """Slices of the vocabulary one after the other: (start, end, which of the pairs are in it)."""

    def __init__(
        self,
        hidden_U_D: Tensor,
        weight_V_D: Tensor,
        bias_V: Tensor | None,
        rows_P: Tensor,
        ids_P: Tensor,
        shape: Shape,
        compute: torch.dtype,
    ) -> None:
        """Raises IndexError for an id that is not in the vocabulary."""
        self._is_rounded = (
            compute == torch.bfloat16 and hidden_U_D.device.type == "cpu" and multiplies_bfloat16()
        )
        self.kept_as = torch.float32 if self._is_rounded else compute
        """Type of factors; where products round them, they come as they are."""
        self.hidden_U_D = hidden_U_D.to(self.kept_as)
        self.wide = torch.float64 if compute == torch.float64 else torch.float32
        self._weight_V_D, self._bias_V, self._shape = weight_V_D, bias_V, shape
        rows, ids = len(hidden_U_D), len(weight_V_D)
        self._width = min(ids, slice_width(rows, hidden_U_D.is_cuda))
        self._edges = [*range(0, ids, self._width), ids]
        sorted_P, self._order_P = ids_P.sort()
        self._bounds = torch.searchsorted(sorted_P, sorted_P.new_tensor(self._edges)).tolist()
        if self._bounds[0] != 0 or self._bounds[-1] != len(ids_P):
            raise IndexError(
                f"ids {int(sorted_P[0])} to {int(sorted_P[-1])} are not all within a vocabulary of"
                f" {ids}"
            )
        self._logits = self.spare()

    def __iter__(self) -> Iterator[tuple[int, int, Tensor]]:
        """In order."""
        for at, (start, end) in enumerate(zip(self._edges, self._edges[1:], strict=False)):
            yield start, end, self._order_P[self._bounds[at] : self._bounds[at + 1]]

    def spare(self) -> Tensor:
        """Room for the logits of a slice; see `view`."""
        return self.hidden_U_D.new_empty(len(self.hidden_U_D) * self._width, dtype=self.wide)

    def view(self, room: Tensor, start: int, end: int) -> Tensor:
        """Room as [U, C]."""
        rows = len(self.hidden_U_D)
        return room[: rows * (end - start)].view(rows, end - start)

    def kept_rooms(self) -> list[Tensor]:
        """Buffers for the logits of the first slices; blocks of them are freed together."""
        rows, width = self.hidden_U_D.shape
        size = rows * self._width
        count = int(min(MOST_KEPT, KEPT_OF_WEIGHT * width / max(1, rows)) * (len(self._edges) - 1))
        block_rows = max(1, BLOCK // max(1, size))
        blocks = [min(block_rows, count - start) for start in range(0, count, block_rows)]
        return [
            room
            for slices in blocks
            for room in self.hidden_U_D.new_empty(slices, size, dtype=self.wide).unbind()
        ]

    def weight(self, start: int, end: int) -> Tensor:
        """[C, D] in the type that is computed in."""
        return self._weight_V_D[start:end].to(self.hidden_U_D.dtype)

    def logits(self, start: int, end: int, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [U, C], in a room that the next call overwrites unless one is given, and their
        `weight`.
        """
        weight_C_D = self.weight(start, end)
        logits_U_C = self.view(self._logits if room is None else room, start, end)
        self.product(self.hidden_U_D, weight_C_D.t(), out=logits_U_C)
        if self._bias_V is not None:
            logits_U_C += self._bias_V[start:end]
        if self._shape.cap is not None:
            logits_U_C.div_(self._shape.cap).tanh_().mul_(self._shape.cap)
        if self._shape.scale != 1.0:
            logits_U_C *= self._shape.scale
        return logits_U_C, weight_C_D

    def product(self, left: Tensor, right: Tensor, *, out: Tensor, added: bool = False) -> None:
        """out = left @ right, or added to it."""
        _product(left, right, out=out, is_rounded=self._is_rounded, added=added)

    def slope(self, logits_U_C: Tensor) -> Tensor | None:
        """Derivative of the capped logits; None where there is no cap."""
        if self._shape.cap is None:
            return None
        return 1 - (logits_U_C / (self._shape.scale * self._shape.cap)).square_()


def slice_width(rows: int, gpu: bool) -> int:
    """Ids of a slice."""
    fitting = (GPU_SLICE if gpu else CPU_SLICE) // max(1, rows)
    return max(LEAST_IDS, fitting // 128 * 128)


def _product(
    left: Tensor, right: Tensor, *, out: Tensor, is_rounded: bool, added: bool = False
) -> None:
    """out = left @ right, or added to it, in a type that may be wider than theirs."""
    if is_rounded and out.dtype == torch.float32:
        rounded_product(left, right, out=out, added=added)
    elif added and left.dtype == out.dtype:
        out.addmm_(left, right)
    elif added or is_rounded:
        product = torch.empty_like(out, dtype=torch.float32)
        _product(left, right, out=product, is_rounded=is_rounded)
        if added:
            out += product
        else:
            out.copy_(product)
    elif left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif left.is_cuda and torch.version.hip is None:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        out.copy_(torch.mm(left, right))
