"""The weight plane between processes that share a GPU, or the GPUs of one machine: segments in
device memory.

All messages, locks and gates are those of `SharedMemory`; only the tensors lie elsewhere. A segment
is two small files: the first one's lock is the gate, and it holds the handle that opens the buffer;
the lock of the second, the lease, is held by every process that has the buffer open. The driver
leaves undefined what happens to an open buffer that its exporter frees, so a writer lets go of one
only when nobody holds its lease: a killed reader holds none.

A GPU works behind the program's back. The gate opens when the copies into the buffer are done
(publish on the stream that made the tensors), and a reader steps out when nothing that it has asked
for reads the buffer any more. Parameters on the same GPU and of the same dtype become views of the
buffer; whatever keeps pointers, as captured CUDA graphs do, reads with `adopt="copy"`. Readers on a
peer GPU must see the writer's (CUDA_VISIBLE_DEVICES), and copy from it. Within one process a `Hub`
serves.

The memory is allocated, exported and opened through NVIDIA's driver. Torch's own way,
`UntypedStorage._share_cuda_`, lends out a piece of its caching allocator: a handle for one reader,
with a count that a killed reader never gives back, and with expandable segments no handle but a
file descriptor that containers refuse to pass. A buffer here is an allocation of its own, which
torch's allocator knows nothing of: one handle of 64 bytes opens it as often as there are readers,
whatever PYTORCH_CUDA_ALLOC_CONF says.

The handle names the GPU by its UUID: CUDA_VISIBLE_DEVICES may number GPUs differently in each
process. Source: CUDA Driver API, memory management (cuIpcGetMemHandle, cuIpcOpenMemHandle); CUDA
array interface, version 3.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from pathlib import Path
from typing import Any

import torch

from transport.codec import Codec, Message
from transport.errors import MessageError
from transport.weights.errors import SegmentError
from transport.weights.executors import ReaderSegment, WriterSegment
from transport.weights.executors.address import LocalAddress, Socket, flock
from transport.weights.executors.peer_memory import DeviceMemory, Handle, departing, numbered
from transport.weights.executors.shared_memory import FileReaderPort, FileWriterPort, SharedMemory
from transport.weights.protocol.messages import ReaderMessage

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


class _Block:
    """Device memory as torch takes it; it is given back when neither this nor a tensor of it is
    left.
    """

    def __init__(
        self, pointer: int, nbytes: int, give_back: Callable[[int, int], None], ordinal: int
    ) -> None:
        self.pointer = pointer
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }
        weakref.finalize(self, _quietly, give_back, ordinal, pointer).atexit = False


class CudaMemory:
    """Memory of one GPU; opens that of every GPU which this process sees."""

    def __init__(self, device: torch.device, driver: Driver | None = None) -> None:
        """`device` is where buffers are allocated, cuda or cuda:k."""
        self._driver = driver or Driver()
        self._ordinal: int = numbered(device).index

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] of zeros; SegmentError when the GPU is full, after torch has given back
        what it keeps.
        """
        try:
            pointer = self._allocate(nbytes)
        except DriverError as error:
            free, whole = torch.cuda.mem_get_info(self._ordinal)
            raise SegmentError(
                f"no GPU memory for a version of {nbytes >> 20} MiB; found {error}, {free >> 20} of"
                f" {whole >> 20} MiB free on GPU {self._ordinal}; two buffers of that size are"
                " needed: give the model, or the cache of the generator, less"
            ) from None
        return self._tensor(
            _Block(pointer, nbytes, self._driver.free, self._ordinal), self._ordinal
        ).zero_()

    def export(self, buffer: torch.Tensor) -> Handle:
        """The driver's handle and the GPU's UUID."""
        handle = self._driver.export(self._ordinal, buffer.data_ptr())
        gpu = self._driver.uuid(self._ordinal)
        return {"gpu": gpu, "handle": handle, "nbytes": len(buffer), "process": os.getpid()}

    def open(self, handle: Handle, *, to_write: bool = False) -> torch.Tensor:
        """A buffer of another process, on the GPU where it lies. Copies between peers go through
        torch. `to_write`: from this memory's own GPU, as if it lay there: this process has no
        context on the other, which would take memory there and turns with what computes.
        """
        visible = self._driver.uuids()
        if handle["gpu"] not in visible:
            raise SegmentError(
                "the weights lie on a GPU that this process does not see; found"
                f" {handle['gpu'].hex()}, visible {[uuid.hex() for uuid in visible]}; let"
                " CUDA_VISIBLE_DEVICES name it too, after the process's own, or choose another"
                " executor"
            )
        if handle["process"] == os.getpid():
            raise SegmentError(
                "a process cannot open its own CUDA memory; found writer and reader in one; give"
                " both a Hub"
            )
        ordinal = self._ordinal if to_write else visible.index(handle["gpu"])
        try:
            pointer = self._driver.open(ordinal, handle["handle"])
        except DriverError as error:
            raise SegmentError(
                f"the GPU memory of process {handle['process']} cannot be opened; found {error};"
                " both processes must be of one user and see each other (containers: one IPC and"
                " PID namespace), without MIG between them"
            ) from None
        block = _Block(pointer, handle["nbytes"], self._driver.close, ordinal)
        if to_write:
            return tensor_at(pointer, handle["nbytes"], torch.device("cuda", ordinal), block)
        return self._tensor(block, ordinal)

    def written(self, buffer: torch.Tensor) -> None:
        """Wait for the thread's stream: copies from other devices end on it too."""
        torch.cuda.current_stream(buffer.device).synchronize()

    def read(self, buffer: torch.Tensor) -> None:
        """Wait for all streams of the device: parameters that are views of the buffer are read on
        any.
        """
        torch.cuda.synchronize(buffer.device)

    def _allocate(self, nbytes: int) -> int:
        try:
            return self._driver.allocate(self._ordinal, nbytes)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
        torch.cuda.empty_cache()
        return self._driver.allocate(self._ordinal, nbytes)

    @staticmethod
    def _tensor(block: _Block, ordinal: int) -> torch.Tensor:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        tensor = torch.as_tensor(block, device=torch.device("cuda", ordinal))
        if tensor.data_ptr() != block.pointer:
            raise SegmentError(
                f"torch has copied shared GPU memory; found it on GPU {ordinal} but torch placed it"
                " elsewhere; this release of torch numbers devices otherwise than the driver does"
            )
        return tensor


def tensor_at(pointer: int, nbytes: int, device: torch.device, block: object) -> torch.Tensor:
    """uint8[nbytes] at an address that the device can reach. `block` lives as long as a tensor of
    it.
    """
    storage = torch._C._construct_storage_from_data_pointer(pointer, device, nbytes)
    tensor = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    weakref.finalize(tensor.untyped_storage(), _forget, block).atexit = False
    return tensor


def _forget(block: object) -> None:
    """The last reference to it goes."""


def _quietly(give_back: Callable[[int, int], None], ordinal: int, pointer: int) -> None:
    """Run in a finaliser, where no caller could catch an error: after a fault on the GPU every call
    fails.
    """
    with contextlib.suppress(DriverError):
        give_back(ordinal, pointer)


HANDLE_BYTES = 1024
"""Room for a `BufferHandle` in a segment's file, behind its size."""
SIZE = struct.Struct("<I")
LEASE_BYTES = 64
"""Of the second file, which holds nothing; its gate stands open at version 0."""


class BufferHandle(Message, kw_only=True):
    """What a segment's file holds."""

    lease: str
    """Key of the second file."""
    handle: Handle


CODEC: Codec[BufferHandle] = Codec("cuda-ipc", 1, BufferHandle)


class CudaIpc(SharedMemory):
    """An address of the form ipc:///folder/name.sock, or tcp://127.0.0.1:port, and a GPU."""

    def __init__(
        self,
        address: str,
        device: str | int | torch.device = "cuda",
        *,
        folder: str | Path | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """`device`: where the writer's buffers lie; a reader opens them where they are.

        `folder`: where the handles lie, as for `SharedMemory`. `memory` stands in for that of the
        GPU.
        """
        super().__init__(address, folder=folder)
        self.device = (
            torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        )
        self._memory = memory

    def writer(self, poll: Callable[[], None]) -> _WriterPort:
        """Claim the address. AddressTaken when another live writer has; SegmentError where there is
        no GPU.
        """
        memory = self._device_memory()
        return _WriterPort(self.place, *self._claimed(), memory)

    def reader(self) -> _ReaderPort:
        """Connect to the address. SegmentError where there is no GPU."""
        return _ReaderPort(self.place, self._device_memory())

    def _device_memory(self) -> DeviceMemory:
        if self._memory is not None:
            return self._memory
        from transport.weights.executors.cuda_ipc import CudaMemory

        return CudaMemory(self.device)


class _WriterSegment:
    progress: torch.Tensor | None

    def __init__(
        self, file: Callable[[int], WriterSegment], memory: DeviceMemory, nbytes: int
    ) -> None:
        self.buffer, self.progress = memory.allocate(nbytes), None
        self._memory = memory
        handle = memory.export(self.buffer)
        self._lease = file(LEASE_BYTES)
        try:
            self._gate = file(HANDLE_BYTES)
        except SegmentError:
            self._lease.retire()
            self._lease.close()
            raise
        self.key = self._gate.key
        packed = CODEC.encode(BufferHandle(lease=self._lease.key, handle=handle))
        stored = bytearray(SIZE.pack(len(packed)) + packed)
        self._gate.buffer[: len(stored)] = torch.frombuffer(stored, dtype=torch.uint8)
        self._lease.unseal(0)

    def seal(self) -> bool:
        return self._gate.seal()

    def unseal(self, version: int) -> None:
        self._memory.written(self.buffer)
        self._gate.unseal(version)

    def retire(self) -> None:
        self._gate.retire()
        self._lease.retire()

    def close(self) -> None:
        self._gate.close()
        departing.add(self._lease, self.buffer)
        self.buffer = torch.empty(0, dtype=torch.uint8)
        departing.release()


class _ReaderSegment:
    progress: torch.Tensor | None

    def __init__(
        self, gate: ReaderSegment, lease: ReaderSegment, memory: DeviceMemory, buffer: torch.Tensor
    ) -> None:
        self.buffer, self.progress = buffer, None
        self._gate, self._lease, self._memory = gate, lease, memory

    def enter(self, version: int) -> bool:
        return self._gate.enter(version)

    def leave(self) -> None:
        self._memory.read(self.buffer)
        self._gate.leave()

    def close(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self._gate.close()
        self._lease.leave()
        self._lease.close()


class _WriterPort(FileWriterPort):
    def __init__(
        self, place: LocalAddress, socket: Socket, lock: int, memory: DeviceMemory
    ) -> None:
        super().__init__(place, socket, lock)
        self._memory = memory

    def segment(self, nbytes: int) -> WriterSegment:
        return _WriterSegment(super().segment, self._memory, nbytes)

    def receive(self) -> list[tuple[bytes, ReaderMessage]]:
        departing.release()
        return super().receive()


class _ReaderPort(FileReaderPort):
    def __init__(self, place: LocalAddress, memory: DeviceMemory) -> None:
        super().__init__(place)
        self._memory = memory

    def segment(self, key: str, nbytes: int) -> ReaderSegment | None:
        with ExitStack() as opened:
            gate = super().segment(key, HANDLE_BYTES)
            if gate is None:
                return None
            opened.callback(gate.close)
            stored = _unpacked(gate.buffer)
            lease = super().segment(stored.lease, LEASE_BYTES)
            if lease is None:
                return None
            opened.callback(lease.close)
            buffer = self._open(stored.handle) if lease.enter(0) else None
            if buffer is None or len(buffer) != nbytes:
                return None
            opened.pop_all()
            return _ReaderSegment(gate, lease, self._memory, buffer)

    def _open(self, handle: Handle) -> torch.Tensor | None:
        """None when it cannot be opened because its writer has just died; the next one offers
        another.
        """
        try:
            return self._memory.open(handle)
        except SegmentError:
            if _owned(self._place):
                raise
            return None


def _unpacked(payload: torch.Tensor) -> BufferHandle:
    """What the writer stored at the start of a segment's file."""
    stored = payload.numpy().tobytes()
    (size,) = SIZE.unpack_from(stored)
    try:
        return CODEC.decode(stored[SIZE.size : SIZE.size + size])
    except MessageError as error:
        raise MessageError(
            f"a segment's handle cannot be read; found {error}; writer and reader must run the same"
            " release, and both on CUDA IPC"
        ) from None


def _owned(place: LocalAddress) -> bool:
    """Whether a live writer has the address."""
    try:
        lock = os.open(place.lock_path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not flock(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)
