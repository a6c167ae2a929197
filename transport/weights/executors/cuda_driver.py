"""The calls of NVIDIA's driver (libcuda) that let processes share device memory, through ctypes.

Source: CUDA Driver API: primary context management, memory management, device management.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import (
    CDLL,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_void_p,
)
from typing import Any

from transport.weights.errors import SegmentError

PAGE_BYTES = 2 << 20
"""Allocations are multiples of it: the driver packs smaller ones together, and a handle opens all
it has packed."""
OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""
PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the one flag that there is."""


class DriverError(Exception):
    """A call of the driver failed."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.code = code


class _Uuid(Structure):
    _fields_ = (("bytes", c_ubyte * 16),)


class _IpcHandle(Structure):
    _fields_ = (("bytes", c_ubyte * 64),)


class Driver:
    """libcuda: its calls raise DriverError, and a device's primary context, torch's own, is made
    current for them.
    """

    def __init__(self, library: Any = None) -> None:
        """`library` stands in for libcuda.so.1. SegmentError where there is none."""
        try:
            self._library = library or CDLL("libcuda.so.1")
            self._contexts: dict[int, c_void_p] = {}
            self.call("cuInit", c_uint(0))
        except (OSError, DriverError) as error:
            raise SegmentError(
                f"CUDA IPC needs a GPU and NVIDIA's driver; found {error}; use SharedMemory on this"
                " machine"
            ) from None

    def call(self, name: str, *arguments: Any) -> None:
        """One call; each argument is a ctypes object."""
        if code := getattr(self._library, name)(*arguments):
            text = c_char_p()
            self._library.cuGetErrorName(c_int(code), byref(text))
            raise DriverError(name, code, (text.value or b"unknown error").decode())

    @contextmanager
    def on(self, ordinal: int) -> Iterator[None]:
        """Make this device's primary context the thread's, and afterwards the one before."""
        if ordinal not in self._contexts:
            context = c_void_p()
            self.call("cuDevicePrimaryCtxRetain", byref(context), self._device(ordinal))
            self._contexts[ordinal] = context
        self.call("cuCtxPushCurrent_v2", self._contexts[ordinal])
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def uuids(self) -> list[bytes]:
        """The UUID of each device that this process sees, by its number here."""
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        return [self.uuid(ordinal) for ordinal in range(count.value)]

    def uuid(self, ordinal: int) -> bytes:
        """A device's UUID, 16 bytes."""
        uuid = _Uuid()
        self.call("cuDeviceGetUuid_v2", byref(uuid), self._device(ordinal))
        return bytes(uuid.bytes)

    def allocate(self, ordinal: int, nbytes: int) -> int:
        """The address of new memory, at least that many bytes."""
        pointer = c_uint64()
        with self.on(ordinal):
            self.call(
                "cuMemAlloc_v2", byref(pointer), c_size_t(-(-nbytes // PAGE_BYTES) * PAGE_BYTES)
            )
        return pointer.value

    def free(self, ordinal: int, pointer: int) -> None:
        """Give back what `allocate` gave."""
        with self.on(ordinal):
            self.call("cuMemFree_v2", c_uint64(pointer))

    def export(self, ordinal: int, pointer: int) -> bytes:
        """The handle, 64 bytes, of allocated memory."""
        handle = _IpcHandle()
        with self.on(ordinal):
            self.call("cuIpcGetMemHandle", byref(handle), c_uint64(pointer))
        return bytes(handle.bytes)

    def open(self, ordinal: int, handle: bytes) -> int:
        """The address here of memory that another process has exported."""
        pointer = c_uint64()
        with self.on(ordinal):
            exported = _IpcHandle.from_buffer_copy(handle)
            self.call("cuIpcOpenMemHandle_v2", byref(pointer), exported, c_uint(PEER_ACCESS))
        return pointer.value

    def close(self, ordinal: int, pointer: int) -> None:
        """Forget what `open` gave."""
        with self.on(ordinal):
            self.call("cuIpcCloseMemHandle", c_uint64(pointer))

    def _device(self, ordinal: int) -> c_int:
        device = c_int()
        self.call("cuDeviceGet", byref(device), c_int(ordinal))
        return device
