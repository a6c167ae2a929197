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
    found = built("kernels.c")
    if found is None:
        return None
    found.dataflow_copy.argtypes = (_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG)
    found.dataflow_copy.restype = None
    found.dataflow_sums.argtypes = (_POINTER, _POINTER, _POINTER, _LONG, _POINTER)
    found.dataflow_sums.restype = None
    found.dataflow_follow.argtypes = (_POINTER,)
    found.dataflow_follow.restype = _LONG
    found.dataflow_forget.argtypes = (_POINTER,)
    found.dataflow_forget.restype = None
    return found
