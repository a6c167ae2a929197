"""Compiles the C kernels for this machine's processor, once, and loads them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401  its OpenMP runtime has to be in the process first, so that the kernels use the same one

from operators.engine.pages import PAGE

FOLDER = Path(__file__).parent
SOURCES = ("kernels.c", "vectors.c", "pages.c", "attention.c", "matmul.c", "decoder.c")
"""The first is compiled; it includes the others."""
FLAGS = (
    "-O3", "-march=native", "-fPIC", "-shared", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", f"-DPAGE={PAGE}",
)  # fmt: skip
THREADED = ("-fopenmp",), ()
"""Flags to try one after the other: a compiler without OpenMP builds kernels of one thread."""
BUILD_TIMEOUT_S = 120.0


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there is no C compiler or it cannot build them."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    for extra in THREADED:
        try:
            return ctypes.CDLL(str(built(compiler, (*FLAGS, *extra))))
        except (OSError, subprocess.SubprocessError):
            continue
    return None


def built(compiler: str, flags: tuple[str, ...]) -> Path:
    """The shared library: from the cache folder, or compiled into it.

    Raises OSError or subprocess.SubprocessError where that fails.
    """
    text = "\n".join((FOLDER / name).read_text("utf-8") for name in SOURCES)
    known = "\n".join([text, compiler, *flags, _processor()])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dataflow-rl"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="dataflow-rl-"))
    found = folder / f"kernels-{hashlib.sha256(known.encode()).hexdigest()[:16]}.so"
    if not found.is_file():
        handle, fresh = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            subprocess.run(
                [compiler, *flags, "-o", fresh, str(FOLDER / SOURCES[0]), "-lm"],
                check=True, capture_output=True, timeout=BUILD_TIMEOUT_S,
            )  # fmt: skip
            Path(fresh).replace(found)
        finally:
            Path(fresh).unlink(missing_ok=True)
    return found


def _processor() -> str:
    """What tells processors apart that need other machine code."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return " ".join(os.uname())
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
