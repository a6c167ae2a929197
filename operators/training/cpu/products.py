"""Matrix products of float32 tensors on a CPU that multiplies bfloat16: factors rounded to it, sums
in float32.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from pathlib import Path

import torch
from torch import Tensor

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
