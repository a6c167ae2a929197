"""Decode attention over the paged cache, by the C kernel: siblings read the pages that they share
once.

Axes: n rows, H query heads, K key/value heads, D width of a head, P pages of PAGE tokens, W pages
of a row, r runs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dataflow.system.native import compiled
from operators.engine.attention import AttentionLayout
from operators.engine.pages import PAGE
from operators.models.folders import ModelError

FOLDER = Path(__file__).parent
SOURCES = ("kernels.c", "vectors.c", "pages.c", "attention.c", "matmul.c", "decoder.c")
"""The first is compiled; it includes the others."""
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", f"-DPAGE={PAGE}")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels; None where they cannot be built. A compiler without OpenMP builds kernels of one
    thread.
    """
    return compiled(tuple(FOLDER / name for name in SOURCES), ((*FLAGS, "-fopenmp"), FLAGS))


MOST_QUERIES = 64
"""Queries of one head that a unit of work takes at once."""
DTYPES = (torch.float32, torch.bfloat16)

_LONG, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_ARGUMENTS = (
    *(_POINTER, _LONG, _LONG) * 3,
    _POINTER,
    _POINTER,
    _LONG,
    _POINTER,
    _POINTER,
    _LONG,
    _POINTER,
    _POINTER,
    _POINTER,
    *(_LONG,) * 6,
    _FLOAT,
    _FLOAT,
    _LONG,
    _POINTER,
    _POINTER,
    _LONG,
    _LONG,
)
Compiled = Callable[..., None]


@functools.cache
def kernel() -> Compiled | None:
    """The compiled kernel; None where there is no C compiler that can build it."""
    lib = library()
    if lib is None:
        return None
    function: Any = lib.dataflow_decode_attention
    function.argtypes, function.restype = _ARGUMENTS, None
    lib.dataflow_attention_scratch.argtypes = (_LONG,) * 3
    lib.dataflow_attention_scratch.restype = _LONG
    return function  # type: ignore[no-any-return]


def serves(model: torch.nn.Module) -> bool:
    """Whether the kernel can take what the model computes: all float32 or all bfloat16, on the
    CPU.
    """
    kinds = {(weight.dtype, weight.device.type) for weight in model.parameters()}
    return len(kinds) == 1 and kinds <= {(dtype, "cpu") for dtype in DTYPES}


def decode_attention(
    kernel: Compiled,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: AttentionLayout,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Write key and value [K, n, D] at the rows' positions into their pages and attend there with
    query [H, n, D].

    keys and values are a layer's, [P, K, PAGE, D], dense. All of one type, float32 or bfloat16, on
    the CPU; sums and weights are float32. A row's bits depend neither on the other rows nor on
    threads. Returns [n, H, D]. Raises ModelError for tensors that the kernel cannot take.
    """
    heads, rows, width = query.shape
    shapes = [tuple(tensor.shape) for tensor in (key, value, keys, values)]
    groups = keys.shape[1]
    if (
        shapes[0] != shapes[1]
        or shapes[2] != shapes[3]
        or shapes[2][1:] != (groups, PAGE, width)
        or heads % groups
        or shapes[0] != (groups, rows, width)
        or not query.stride(2) == key.stride(2) == value.stride(2) == 1
        or not keys.is_contiguous()
        or not values.is_contiguous()
        or query.dtype not in DTYPES
        or not query.dtype == key.dtype == value.dtype == keys.dtype == values.dtype
    ):
        raise ModelError(
            "the C kernel needs queries, keys and values of one width and type (float32 or"
            f" bfloat16) with a dense last axis; found {tuple(query.shape)} {query.dtype}, {shapes}"
            f" {keys.dtype}; attend with torch's operators"
        )
    repeats, threads = heads // groups, torch.get_num_threads()
    most_rows = max(1, min(MOST_QUERIES // repeats, -(-rows * groups // (2 * threads))))
    size = scratch_floats(most_rows * repeats, width, layout.longest)
    out = torch.empty(rows, heads, width, dtype=query.dtype)
    units = torch.empty(3 * rows, dtype=torch.int64)
    scratch = torch.empty(threads * size)
    runs, shared = (None, None) if layout.runs is None else layout.runs()
    kernel(
        query.data_ptr(),
        query.stride(1),
        query.stride(0),
        key.data_ptr(),
        key.stride(1),
        key.stride(0),
        value.data_ptr(),
        value.stride(1),
        value.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        query.dtype == torch.bfloat16,
        out.data_ptr(),
        layout.table.data_ptr(),
        layout.table.stride(0),
        layout.positions.data_ptr(),
        None if runs is None else runs.data_ptr(),
        None if shared is None else shared.data_ptr(),
        0 if shared is None else len(shared),
        rows,
        groups,
        repeats,
        width,
        window or 0,
        scale,
        softcap or 0.0,
        most_rows,
        units.data_ptr(),
        scratch.data_ptr(),
        size,
        threads,
    )
    return out


def scratch_floats(queries: int, width: int, longest: int) -> int:
    """Floats that one thread needs to attend with so many queries at once, in whole cache lines."""
    lib = library()
    assert lib is not None
    return int(-(-lib.dataflow_attention_scratch(queries, width, longest) // 16) * 16)
