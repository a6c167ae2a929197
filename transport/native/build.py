"""Compiles the transport's C files for this machine's processor, once, and loads them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-fPIC", "-shared", "-std=gnu11", "-pthread")
TUNED = ("-march=native",), ()
"""Flags to try one after the other: not every compiler knows its machine."""
BUILD_TIMEOUT_S = 120.0

_LONG, _POINTER = ctypes.c_int64, ctypes.c_void_p


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels that copy and sum; None where there is no C compiler or it cannot build them."""
    found = compiled("kernels.c")
    return None if found is None else _typed(found)


@functools.cache
def compiled(source: str) -> ctypes.CDLL | None:
    """The library of a C file of this folder; None where there is no C compiler or it cannot build it."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    for tuned in TUNED:
        try:
            return ctypes.CDLL(str(built(FOLDER / source, compiler, (*FLAGS, *tuned))))
        except (OSError, subprocess.SubprocessError):
            continue
    return None


def _typed(found: ctypes.CDLL) -> ctypes.CDLL:
    found.dataflow_copy.argtypes = (_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG)
    found.dataflow_copy.restype = None
    found.dataflow_sums.argtypes = (_POINTER, _POINTER, _POINTER, _LONG, _POINTER)
    found.dataflow_sums.restype = None
    found.dataflow_follow.argtypes = (_POINTER,)
    found.dataflow_follow.restype = _LONG
    found.dataflow_forget.argtypes = (_POINTER,)
    found.dataflow_forget.restype = None
    return found


def built(source: Path, compiler: str, flags: tuple[str, ...]) -> Path:
    """The shared library of a C file: from the cache folder, or compiled into it.

    Raises OSError or subprocess.SubprocessError where that fails.
    """
    known = "\n".join([source.read_text("utf-8"), compiler, *flags, _processor()])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dataflow-rl"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="dataflow-rl-"))
    found = folder / f"transport-{hashlib.sha256(known.encode()).hexdigest()[:16]}.so"
    if not found.is_file():
        handle, fresh = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            command = [compiler, *flags, "-o", fresh, str(source), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
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
