"""What this machine has that a plan could map onto."""

import os
import re
from pathlib import Path
from typing import Literal

import psutil

from dataflow.planning.hosts import Devices
from dataflow.system.gpu_memory import gpu_memory

_CPU_INFO = Path("/proc/cpuinfo")


def this_machine() -> Devices:
    """Cores, memory and accelerators at hand, without importing torch."""
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or len(
        list(Path("/dev").glob("nvidia[0-9]*"))
    )
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Devices(
        cpus=cpus,
        gpus=gpus,
        memory_bytes=psutil.virtual_memory().total,
        gpu_memory_bytes=gpu_memory() if gpus else 0,
    )


def quick_dtype() -> Literal["float32", "bfloat16"]:
    """The type of weights that this machine multiplies fastest: "bfloat16" on GPUs, on processors
    with AMX, and on AMD's with AVX-512 BF16; else "float32".

    Intel's processors have AVX-512 BF16 as well, but without AMX it multiplies no faster there than
    float32 in registers, and half as fast in torch (docs/figures.md, machine D).
    """
    if this_machine().gpus:
        return "bfloat16"
    try:
        processor = _CPU_INFO.read_text("utf-8", errors="replace")
    except OSError:
        return "float32"

    def says(name: str, word: str) -> bool:
        return re.search(rf"^{name}\b.*\b{word}\b", processor, re.MULTILINE) is not None

    is_quick = says("flags", "amx_bf16") or (
        says("flags", "avx512_bf16") and says("vendor_id", "AuthenticAMD")
    )
    return "bfloat16" if is_quick else "float32"
