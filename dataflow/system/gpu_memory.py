"""How much memory this machine's accelerators have, and their names, asked of NVIDIA's management
library: no CUDA context, no torch.
"""

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_LIBRARY = "libnvidia-ml.so.1"
_LONGEST = 96
"""Bytes of a name, with the 0 at its end."""


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def gpu_memory(library: Any = None) -> int:
    """Bytes of the smallest of them; 0 where nobody can tell. library: in the place of NVIDIA's."""
    return min(_asked(library, _total), default=0)


def gpu_names(library: Any = None) -> list[str]:
    """What their maker calls them, as in `NVIDIA H100 80GB HBM3`; empty where nobody can tell."""
    return _asked(library, _name)


def _asked(library: Any, ask: Callable[[Any, ctypes.c_void_p], T | None]) -> list[T]:
    """Of those that answer; the library says 0 when all is well."""
    with contextlib.suppress(OSError, AttributeError):
        nvml = library or ctypes.CDLL(_LIBRARY)
        if nvml.nvmlInit_v2():
            return []
        try:
            count, devices = ctypes.c_uint(), []
            if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
                return []
            for number in range(count.value):
                handle = ctypes.c_void_p()
                if not nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)):
                    devices.append(ask(nvml, handle))
            return [device for device in devices if device is not None]
        finally:
            nvml.nvmlShutdown()
    return []


def _total(asked: Any, handle: ctypes.c_void_p) -> int | None:
    memory = _Memory()
    return (
        None if asked.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) else int(memory.total)
    )


def _name(asked: Any, handle: ctypes.c_void_p) -> str | None:
    name = ctypes.create_string_buffer(_LONGEST)
    return (
        None
        if asked.nvmlDeviceGetName(handle, name, _LONGEST)
        else name.value.decode(errors="replace")
    )
