"""The transport's kernels in C, where this machine has a compiler for them."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from transport.compile import compiled

FLAGS = ("-O3", "-std=gnu11", "-fno-trapping-math", "-pthread")

_LONG, _POINTER = ctypes.c_int64, ctypes.c_void_p


def built(source: str) -> ctypes.CDLL | None:
    """The library of a C file of this folder; None where there is no C compiler or it cannot build
    it.
    """
    return compiled((Path(__file__).parent / source,), (FLAGS,))


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels that copy and sum."""
    lib = built("kernels.c")
    if lib is None:
        return None
    lib.dataflow_copy.argtypes = (_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG)
    lib.dataflow_copy.restype = None
    lib.dataflow_sums.argtypes = (_POINTER, _POINTER, _POINTER, _LONG, _POINTER)
    lib.dataflow_sums.restype = None
    lib.dataflow_follow.argtypes = (_POINTER,)
    lib.dataflow_follow.restype = _LONG
    lib.dataflow_forget.argtypes = (_POINTER,)
    lib.dataflow_forget.restype = None
    return lib
