"""Log-probabilities and entropies of chosen tokens from hidden states, a slice of the vocabulary at
a time; uses torch.

All logits at once are the largest tensor of a step: [U, V] in float32, and its gradient again. Here
they are computed for a slice of C ids at a time and reduced at once (a running maximum and sum of
exponentials). A part of the slices is kept for the backward pass, where its memory is given back
while the weight's gradient comes to take as much; the others are computed again.

The slices go over V and not over U, so that each part of the weight's gradient is written once,
with the sum over all U inside one matrix product: it needs no wider copy to add up in, and in
bfloat16 it is rounded once.

Ranks that share out the layers before it (tensor parallelism) have the same hidden states: each
computes a share of the rows, and all get the numbers of all.

Axis suffixes as in `packing`; and D width of the model, V vocabulary, C ids of a slice, M tokens
drawn from less than the vocabulary, P pairs of a row and an id whose logit is wanted.

The layer is called by the model as ever, so whatever hangs on the call (the hooks that gather a
sharded weight, or take its gradient away) finds what it expects; only what the layer computes is
another function of the same hidden states and the same weight. What the model does to logits
afterwards is found out when it is loaded, and undone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from operators.training.learner.cpu import DirectGradients, multiplies_bfloat16, rounded_product
from operators.training.learner.row_share import RowShare


@dataclass(frozen=True)
class Wanted:
    """Which tokens' log-probabilities are asked for, on the device of the hidden states."""

    head_T: Tensor
    """Row of the hidden states that each is predicted from."""
    targets_T: Tensor
    """The tokens."""
    tokens_M: Tensor | None = None
    """Which of the T were drawn from what truncation left of the vocabulary; None: none was."""
    segment_K: Tensor | None = None
    """Index into M of each id that was left."""
    ids_K: Tensor | None = None
    """The ids."""

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Row and id of every logit that is wanted by itself: those of the T, then those of the
        K.
        """
        if self.tokens_M is None or self.segment_K is None or self.ids_K is None:
            return self.head_T, self.targets_T
        rows_K = self.head_T[self.tokens_M][self.segment_K]
        return torch.cat([self.head_T, rows_K]), torch.cat([self.targets_T, self.ids_K])


def logprobs_of_logits(
    logits_U_V: Tensor, selection: Wanted, temperature: float, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [T] and, where asked for, entropies [T] in nats, differentiable in the
    logits.
    """
    if logits_U_V.dtype in (torch.bfloat16, torch.float16):
        logits_U_V = logits_U_V.float()
    if temperature != 1.0:
        logits_U_V = logits_U_V / temperature
    logs_U_V = logits_U_V.log_softmax(-1)
    entropy_U = -(logs_U_V.exp() * logs_U_V).sum(-1) if entropy else None
    if selection.tokens_M is None:
        return composed(
            selection, logs_U_V.new_zeros(len(logs_U_V)), logs_U_V[selection.pairs()], entropy_U
        )
    return composed(selection, logits_U_V.logsumexp(-1), logits_U_V[selection.pairs()], entropy_U)


def composed(
    selection: Wanted, normalizer_U: Tensor, picked_P: Tensor, entropy_U: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What is asked for, from each row's normaliser and entropy and the logits of the pairs."""
    normalizer_T = normalizer_U[selection.head_T]
    entropy_T = None if entropy_U is None else entropy_U[selection.head_T]
    values_T = picked_P[: len(selection.targets_T)]
    if selection.tokens_M is not None and selection.segment_K is not None:
        values_K = picked_P[len(selection.targets_T) :]
        normalizer_M = _segment_logsumexp(values_K, selection.segment_K, len(selection.tokens_M))
        normalizer_T = normalizer_T.index_copy(0, selection.tokens_M, normalizer_M)
        if entropy_T is not None:
            shares_K = (values_K - normalizer_M[selection.segment_K]).exp()
            mean_M = torch.zeros_like(normalizer_M).index_add(
                0, selection.segment_K, shares_K * values_K
            )
            entropy_T = entropy_T.index_copy(0, selection.tokens_M, normalizer_M - mean_M)
    return values_T - normalizer_T, entropy_T


def _segment_logsumexp(values_K: Tensor, segment_K: Tensor, segments: int) -> Tensor:
    """Logarithm of the sum of the exponentials of each segment."""
    given_K = values_K.detach()
    most_M = given_K.new_zeros(segments).scatter_reduce_(
        0, segment_K, given_K, "amax", include_self=False
    )
    powers_K = (values_K - most_M[segment_K]).exp()
    return most_M + powers_K.new_zeros(segments).index_add(0, segment_K, powers_K).log()


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
    alike: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [T] and, where asked for, entropies [T] in nats, differentiable in the
    first three.

    direct: writes the weight's gradient where it is kept, if it knows the weight. alike: ranks with
    the same arguments, which call together. Each gets all numbers and the whole gradient of the
    hidden states; those of weight and bias are a part of the sum on each, times the ranks, so that
    their mean is the whole.

    Products are computed in autocast's type where it is on, else in the weight's, and summed up in
    float32 (float64 for float64), which is the result's type too. shape: its scale holds the
    temperature.
    """
    rows_P, ids_P = selection.pairs()
    share = None
    if alike is not None:
        share = RowShare(alike, len(hidden_U_D), rows_P)
        hidden_U_D, rows_P, ids_P = share.hidden(hidden_U_D), share.rows_P, ids_P[share.pairs]
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
    return composed(selection, *(sums if share is None else share.all_of(*sums)))


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


SMALL = 2.0**-10
"""Numbers that go through a cap are made so small that it leaves them as exact as they were; a
power of two."""


@dataclass(frozen=True)
class HeadModule:
    """The last layer of a causal language model, and what the model does to its logits."""

    layer: torch.nn.Linear
    after: Shape

    @classmethod
    def of(cls, module: Any, run: Callable[[], Any]) -> HeadModule | None:
        """The last layer of `module`; None where it is no plain linear one (tensor parallel, an
        adapter on it), or where the model does more to its logits than cap and scale them.

        run: calls the model on a few tokens; what comes out of known numbers in the layer's place
        is looked at.
        """
        layer = module.get_output_embeddings()
        if (
            not isinstance(layer, torch.nn.Linear)
            or type(layer).forward is not torch.nn.Linear.forward
        ):
            return None
        if "forward" in vars(layer):
            return None
        cap = getattr(module.config.get_text_config(), "final_logit_softcapping", None)
        probe = torch.zeros(0)

        def forward(hidden: Tensor) -> Tensor:
            nonlocal probe
            shape = hidden.shape[:-1]
            probe = torch.linspace(-4.0, 4.0, shape.numel(), device=hidden.device).view(*shape, 1)
            return probe

        try:
            with torch.no_grad(), _instead(layer, forward):
                logits = run().logits
        except Exception:  # any refusal means the same: this architecture keeps its logits
            return None
        if logits.shape != probe.shape:
            return None
        capped = probe if not cap else cap * torch.tanh(probe / cap)
        scale = float(logits.flatten()[-1] / capped.flatten()[-1])
        is_known = scale > 0 and torch.allclose(logits, scale * capped, rtol=1e-5, atol=1e-6)
        return cls(layer, Shape(scale=scale, cap=cap or None)) if is_known else None

    def call(
        self, compute: Callable[[Tensor, Tensor, Tensor | None], Tensor], run: Callable[[], Any]
    ) -> Tensor:
        """What `compute` makes of hidden states [U, D], weight and bias: [T, n], through the
        model's forward.

        compute: gets the hidden states of all positions that the layer is asked for. run: calls the
        model.
        """
        small = 1.0 if self.after.cap is None else SMALL

        def forward(hidden: Tensor) -> Tensor:
            return compute(hidden.flatten(0, -2), self.layer.weight, self.layer.bias)[None] * small

        with _instead(self.layer, forward):
            numbers: Tensor = run().logits[0]
        numbers = numbers / self.after.scale
        if self.after.cap is not None:
            numbers = torch.atanh(numbers / self.after.cap) * (self.after.cap / SMALL)
        return numbers


@contextlib.contextmanager
def _instead(layer: torch.nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have a layer compute something else for a while."""
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
