"""Compiles C files for this machine's processor, or the one asked for, once, and loads them."""

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
PROCESSOR = "DATAFLOW_MARCH"
"""The variable that names the processor to compile for, as the compiler's -march does; `none`: as if there were no
compiler. Unset, it is this machine's own."""


@functools.cache
def compiled(sources: tuple[Path, ...], choices: tuple[tuple[str, ...], ...]) -> ctypes.CDLL | None:
    """The shared library of C files, from the cache folder if it was compiled before.

    sources: the first is compiled; it includes the others. choices: flags to try one after the other, for not every
    compiler knows OpenMP. None where there is no C compiler or it cannot build them.
    ValueError where it cannot build them for the processor that DATAFLOW_MARCH names."""
    asked = os.environ.get(PROCESSOR)
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or asked == "none":
        return None
    fault = ""
    for processor in ((f"-march={asked}",),) if asked else (("-march=native",), ()):
        for flags in choices:
            try:
                return ctypes.CDLL(str(_built(sources, compiler, ("-fPIC", "-shared", *processor, *flags))))
            except (OSError, subprocess.SubprocessError) as error:
                fault = str(getattr(error, "stderr", None) or error)
    if asked:
        raise ValueError(
            f"{sources[0].name} cannot be compiled for {PROCESSOR}={asked}; "
            f"found {fault.strip().splitlines()[0][:300]}; name a processor that {compiler} knows as -march, or none"
        )
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
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
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
