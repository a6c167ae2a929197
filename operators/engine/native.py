"""Builds and loads the C kernel of decode attention; without a C compiler, attention stays with torch."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from operators.models import ModelError

SOURCE = Path(__file__).with_name("decode_attention.c")
FLAGS = (
    "-O3", "-march=native", "-fPIC", "-shared", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math",
    "-fassociative-math", "-fno-signed-zeros", "-freciprocal-math",
)  # fmt: skip
BUILD_TIMEOUT_S = 60.0

_LONG, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_ARGUMENTS = (
    *(_POINTER, _LONG, _LONG) * 3, *(_POINTER,) * 6,
    _LONG, _LONG, _LONG, _LONG, _LONG, _LONG, _FLOAT, _FLOAT,
)  # fmt: skip


@functools.cache
def kernel() -> Callable[..., None] | None:
    """`decode_attention` of the C file, compiled once for this machine's processor; None where that fails."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not SOURCE.is_file():
        return None
    try:
        function = ctypes.CDLL(str(_built(compiler))).decode_attention
    except (OSError, subprocess.SubprocessError, AttributeError):
        return None
    function.argtypes, function.restype = _ARGUMENTS, None
    return function


def decode_attention(
    function: Callable[..., None],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Write key and value [K, n, D] at `positions` [n] of `slots` [n] and attend there with query [H, n, D].

    keys and values are the cache's, [S, K, T, D]. All float32 on the CPU (see `serves`), slots and positions
    int64 and dense. Returns [n, H, D]. Raises ModelError for keys and values of unlike shape.
    """
    if key.shape != value.shape or not query.stride(2) == key.stride(2) == value.stride(2) == 1:
        raise ModelError(
            f"the C kernel needs keys and values of one shape with a dense last axis, but got "
            f"{tuple(key.shape)} and {tuple(value.shape)}; attend with torch's operators"
        )
    heads, rows, width = query.shape
    tokens = keys.shape[2]
    out = torch.empty(rows, heads, width)
    scratch = torch.empty(tokens)
    function(
        query.data_ptr(), query.stride(1), query.stride(0), key.data_ptr(), key.stride(1), key.stride(0),
        value.data_ptr(), value.stride(1), value.stride(0), keys.data_ptr(), values.data_ptr(),
        slots.data_ptr(), positions.data_ptr(), out.data_ptr(), scratch.data_ptr(), rows, keys.shape[1],
        heads // keys.shape[1], tokens, width, window or 0, scale, softcap or 0.0,
    )  # fmt: skip
    return out


def serves(model: torch.nn.Module) -> bool:
    """Whether the kernel can take what the model computes: everything float32 on the CPU."""
    return all(weight.dtype == torch.float32 and weight.device.type == "cpu" for weight in model.parameters())


def _built(compiler: str) -> Path:
    """The shared library, from the cache folder or compiled into it."""
    known = "\n".join([SOURCE.read_text("utf-8"), *FLAGS, _processor()])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dataflow-rl"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="dataflow-rl-"))
    library = folder / f"decode_attention-{hashlib.sha256(known.encode()).hexdigest()[:16]}.so"
    if not library.is_file():
        handle, fresh = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            subprocess.run(
                [compiler, *FLAGS, "-o", fresh, str(SOURCE), "-lm"],
                check=True, capture_output=True, timeout=BUILD_TIMEOUT_S,
            )  # fmt: skip
            Path(fresh).replace(library)
        finally:
            Path(fresh).unlink(missing_ok=True)
    return library


def _processor() -> str:
    """What tells processors apart that need other machine code."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return " ".join(os.uname())
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
