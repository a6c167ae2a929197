"""Faster products of matrices on a CPU, and gradients that are computed there without a graph.

For weights in main memory of a learner alone with them. A step there writes and reads all of a
model's gradients as often as its memory is slow: once here, where autograd makes a tensor of each
gradient and adds it to one of zeros.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dataflow.system.native import compiled

_SOURCES = (
    Path(__file__).parent / "products.c",
    Path(__file__).parents[2] / "engine/native/vectors.c",
)
_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math")
_LONG, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _OfThread(threading.local):
    """Scratch memory that stays: allocated for each product it would be the top of the heap, which
    the C library frees each time.
    """

    _words = torch.empty(0, dtype=torch.int32)

    def scratch(self, words: int) -> Tensor:
        if len(self._words) < words:
            self._words = torch.empty(words, dtype=torch.int32)
        return self._words


_OF_THREAD = _OfThread()


@functools.cache
def _library() -> ctypes.CDLL | None:
    lib = compiled(_SOURCES, ((*_FLAGS, "-fopenmp"), _FLAGS))
    if lib is None or not lib.dataflow_multiplies_pairs():
        return None
    lib.dataflow_product_scratch.argtypes, lib.dataflow_product_scratch.restype = (
        (_LONG,) * 3,
        _LONG,
    )
    lib.dataflow_product.argtypes = (
        _POINTER,
        _LONG,
        _LONG,
        _POINTER,
        _LONG,
        _LONG,
        _POINTER,
        _LONG,
        _LONG,
        _LONG,
        _LONG,
        _LONG,
        _POINTER,
        _LONG,
    )
    lib.dataflow_product.restype = None
    return lib


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for it (AVX-512 BF16), and a compiler made the
    kernels.
    """
    return _library() is not None


def rounded_product(
    left_M_K: Tensor, right_K_N: Tensor, *, out: Tensor, added: bool = False
) -> None:
    """out [M, N] = left @ right, or `added` to it: float32 on the CPU, of which one axis each is
    dense, out's last.
    """
    library, threads = _library(), torch.get_num_threads()
    assert library is not None, "this processor multiplies bfloat16"
    (rows, depth), columns = left_M_K.shape, right_K_N.shape[1]
    lhs, rhs = _dense(left_M_K), _dense(right_K_N)
    scratch = _OF_THREAD.scratch(library.dataflow_product_scratch(rows, depth, threads))
    library.dataflow_product(
        lhs.data_ptr(),
        *lhs.stride(),
        rhs.data_ptr(),
        *rhs.stride()[::-1],
        out.data_ptr(),
        out.stride(0),
        rows,
        columns,
        depth,
        added,
        scratch.data_ptr(),
        threads,
    )


def _dense(factor: Tensor) -> Tensor:
    return factor if 1 in factor.stride() else factor.contiguous()


class DirectGradients:
    """The weights of a module's plain linear layers and embeddings, and what of their gradients is
    there already.
    """

    def __init__(self, module: Any, *, is_rounded: bool) -> None:
        """Switch the layers; other gradients of their weights are added as before.

        module: on a CPU, loaded and proved. is_rounded: products of linear layers but the last are
        `rounded_product`, also of weights that need no gradient.
        """
        self.is_rounded = is_rounded
        self._empty: set[Tensor] = set()
        output = (
            module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
        )
        self._weights: dict[Tensor, None] = {}
        layers: list[Any] = list(_plain_layers(module))
        for layer in layers:
            is_trained = layer.weight.requires_grad and layer.weight.dtype == torch.float32
            if is_trained:
                self._weights[layer.weight] = None
            if type(layer) is nn.Embedding and is_trained:
                vars(layer)["forward"] = _Embedded(layer, self)
            elif type(layer) is nn.Linear and layer is not output and (is_trained or is_rounded):
                vars(layer)["forward"] = _Multiplied(layer, self)
        for weight in self._weights:
            weight.register_hook(self._settling(weight))  # type: ignore[no-untyped-call]

    def __contains__(self, weight: object) -> bool:
        return weight in self._weights

    def begin(self) -> None:
        """Of no gradient is anything there: what memory it has, counts for nothing."""
        self._empty = set(self._weights)

    def end(self) -> None:
        """Zeros where nothing came."""
        for weight in list(self._empty):
            self.settle(weight)

    def place(self, weight: Tensor) -> tuple[Tensor, bool]:
        """Where the gradient is kept, and whether something is there to add to. The caller writes
        all of it.
        """
        if weight.grad is None:
            weight.grad = torch.empty_like(weight)
            self._empty.add(weight)
        added = weight not in self._empty
        self._empty.discard(weight)
        return weight.grad, added

    def settle(self, weight: Tensor) -> Tensor:
        """Where the gradient is kept, zeros if nothing is there."""
        place, added = self.place(weight)
        return place if added else place.zero_()

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """left @ right, of float32."""
        if not self.is_rounded:
            return left @ right
        out = left.new_empty(len(left), right.shape[1])
        rounded_product(left, right, out=out)
        return out

    def add_product(self, weight: Tensor, left: Tensor, right: Tensor) -> None:
        """Add left @ right to the gradient."""
        place, added = self.place(weight)
        if self.is_rounded:
            rounded_product(left, right, out=place, added=added)
        elif added:
            place.addmm_(left, right)
        else:
            torch.mm(left, right, out=place)

    def _settling(self, weight: Tensor) -> Any:
        """Before autograd adds a gradient of its own."""

        def hook(gradient: Tensor | None) -> None:
            if gradient is not None and weight.grad is not None:
                self.settle(weight)

        return hook


def _plain_layers(module: nn.Module) -> Iterator[Any]:
    """Linear layers and embeddings that do nothing else, of dense weights."""
    layer: Any
    for layer in module.modules():
        if type(layer) is nn.Embedding:
            is_plain = layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
        else:
            is_plain = type(layer) is nn.Linear
        if is_plain and "forward" not in vars(layer) and layer.weight.is_contiguous():
            yield layer


class _Multiplied:
    """The forward of a linear layer."""

    def __init__(self, layer: nn.Linear, gradients: DirectGradients) -> None:
        self._layer, self._gradients = layer, gradients

    def __call__(self, x: Tensor) -> Tensor:
        """[.., in] to float32 [.., out]."""
        layer = self._layer
        with torch.autocast("cpu", enabled=False):
            out: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
                x.float(), layer.weight, layer.bias, self._gradients
            )
        return out


class _Embedded:
    """The forward of an embedding."""

    def __init__(self, layer: nn.Embedding, gradients: DirectGradients) -> None:
        self._layer, self._gradients = layer, gradients

    def __call__(self, ids: Tensor) -> Tensor:
        """[..] to [.., D]."""
        layer = self._layer
        out: Tensor = _Rows.apply(layer.weight, ids, layer.padding_idx, self._gradients)  # type: ignore[no-untyped-call]
        return out.bfloat16() if self._gradients.is_rounded else out


class _Product(torch.autograd.Function):
    """x @ weight.T + bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradients: DirectGradients
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, bias)
        ctx.weight, ctx.gradients, ctx.shape = weight, gradients, x.shape
        out = gradients.multiply(rows, weight.float().t())
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, ...]:
        rows, bias = ctx.saved_tensors
        by_rows = by_out.reshape(-1, by_out.shape[-1])
        by_x = None
        if ctx.needs_input_grad[0]:
            by_x = ctx.gradients.multiply(by_rows, ctx.weight.float()).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            ctx.gradients.add_product(ctx.weight, by_rows.t(), rows)
        by_bias = by_rows.sum(0) if bias is not None and ctx.needs_input_grad[2] else None
        return by_x, None, by_bias, None


class _Rows(torch.autograd.Function):
    """Rows of a weight."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, gradients: DirectGradients
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding, ctx.gradients = weight, padding, gradients
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        flat, by_rows = ids.flatten(), by_out.reshape(-1, by_out.shape[-1])
        if ctx.padding is not None:  # as torch has it, this id is never trained
            is_real = flat != ctx.padding
            flat, by_rows = flat[is_real], by_rows[is_real]
        ctx.gradients.settle(ctx.weight).index_add_(0, flat, by_rows)
        return None, None, None, None
