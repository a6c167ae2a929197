"""What a run runs on: versions of packages, and the machine, as plain values; imports none of the
packages.
"""

import contextlib
import functools
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from dataflow.planning.hosts import Devices

KEY = "environment"
"""The key in config.json."""
_PACKAGES = (
    "dataflow-rl",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "peft",
    "vllm",
    "triton",
    "pyarrow",
    "pyzmq",
    "numpy",
)
_GPUS = Path("/proc/driver/nvidia")


def environment(devices: Devices) -> dict[str, Any]:
    """The facts of this machine and this process. devices: what the run has here."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cpus": devices.cpus,
        "memory_bytes": devices.memory_bytes,
        "packages": package_versions(),
    }
    if devices.gpus:
        facts |= {
            "gpus": devices.gpus,
            "gpu_models": _gpu_models(),
            "gpu_driver": _first(_GPUS / "version"),
        }
    if threads := os.environ.get("OMP_NUM_THREADS"):
        facts["OMP_NUM_THREADS"] = threads
    return facts


@functools.cache
def package_versions() -> dict[str, str]:
    """Versions of this engine, if it is installed, and of the packages with which it computes."""
    return {name: version for name in _PACKAGES if (version := _version(name))}


def _version(package: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    return platform.processor() or platform.machine()


def _gpu_models() -> list[str]:
    models = []
    for path in sorted(_GPUS.glob("gpus/*/information")):
        with contextlib.suppress(OSError):
            models += re.findall(
                r"^Model:\s*(.+?)\s*$", path.read_text(errors="replace"), re.MULTILINE
            )
    return models


def _first(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").partition("\n")[0].strip()
    return ""
