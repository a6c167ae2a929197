"""How much memory this machine's accelerators have, asked of NVIDIA's management library: no CUDA context, no torch."""

import contextlib
import ctypes
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_memory(library: Any = None) -> int:
    """Bytes of the smallest of them; 0 where nobody can tell. library: in the place of NVIDIA's."""
    with contextlib.suppress(OSError, AttributeError):
        asked = library or ctypes.CDLL(_LIBRARY)
        if asked.nvmlInit_v2():
            return 0
        try:
            return min(_totals(asked), default=0)
        finally:
            asked.nvmlShutdown()
    return 0


def _totals(asked: Any) -> list[int]:
    """Of those that answer; the library says 0 when all is well."""
    count, found = ctypes.c_uint(), []
    if asked.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    for number in range(count.value):
        handle, memory = ctypes.c_void_p(), _Memory()
        if not asked.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) and not asked.nvmlDeviceGetMemoryInfo(
            handle, ctypes.byref(memory)
        ):
            found.append(int(memory.total))
    return found
