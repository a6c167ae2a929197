"""What this machine has that a plan could map onto."""

import os
from pathlib import Path

import psutil

from dataflow.planning.hosts import Devices
from dataflow.system.gpu_memory import gpu_memory


def this_machine() -> Devices:
    """Cores, memory and accelerators at hand, without importing torch."""
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or len(list(Path("/dev").glob("nvidia[0-9]*")))
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Devices(
        cpus=cpus, gpus=gpus, memory_bytes=psutil.virtual_memory().total, gpu_memory_bytes=gpu_memory() if gpus else 0
    )
