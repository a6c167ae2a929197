"""Compiles C files for this machine's processor, once, and loads them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

TIMEOUT_S = 120.0


@functools.cache
def compiled(sources: tuple[Path, ...], choices: tuple[tuple[str, ...], ...]) -> ctypes.CDLL | None:
    """The shared library of C files, from the cache folder if it was compiled before.

    sources: the first is compiled; it includes the others. choices: flags to try one after the other, for not every
    compiler knows its machine, or OpenMP. None where there is no C compiler or it cannot build them."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    for flags in choices:
        try:
            return ctypes.CDLL(str(_built(sources, compiler, ("-fPIC", "-shared", *flags))))
        except (OSError, subprocess.SubprocessError):
            continue
    return None


def _built(sources: tuple[Path, ...], compiler: str, flags: tuple[str, ...]) -> Path:
    known = "\n".join([*(each.read_text("utf-8") for each in sources), compiler, *flags, _processor()])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dataflow-rl"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="dataflow-rl-"))
    found = folder / f"{sources[0].stem}-{hashlib.sha256(known.encode()).hexdigest()[:16]}.so"
    if not found.is_file():
        handle, fresh = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            command = [compiler, *flags, "-o", fresh, str(sources[0]), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
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
