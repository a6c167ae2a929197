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
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from transport.codec import Codec, Message
from transport.errors import MessageError
from transport.weights.errors import SegmentError
from transport.weights.executors.address import LocalAddress, Socket, flock
from transport.weights.executors.peer_memory import DeviceMemory, Handle, departing
from transport.weights.executors.shared_memory import FileReaderPort, FileWriterPort, SharedMemory
from transport.weights.memory.ports import ReaderSegment, WriterSegment
from transport.weights.protocol.messages import ReaderMessage

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
        from transport.weights.executors.cuda_memory import CudaMemory

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
