"""The engine's kernels in C, where this machine has a compiler for them."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch  # noqa: F401  its OpenMP runtime has to be in the process first, so that the kernels use the same one

from dataflow.system.native import compiled
from operators.engine.pages import PAGE

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
