"""A GPU's memory shared between processes: allocated, exported and opened through NVIDIA's driver.

Torch's own way, `UntypedStorage._share_cuda_`, lends out a piece of its caching allocator: a handle
for one reader, with a count that a killed reader never gives back, and with expandable segments no
handle but a file descriptor that containers refuse to pass. A buffer here is an allocation of its
own, which torch's allocator knows nothing of: one handle of 64 bytes opens it as often as there are
readers, whatever PYTORCH_CUDA_ALLOC_CONF says.

The handle names the GPU by its UUID: CUDA_VISIBLE_DEVICES may number GPUs differently in each
process. Source: CUDA Driver API, memory management (cuIpcGetMemHandle, cuIpcOpenMemHandle); CUDA
array interface, version 3.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable

import torch

from transport.weights.errors import SegmentError
from transport.weights.executors.cuda_driver import OUT_OF_MEMORY, Driver, DriverError
from transport.weights.executors.device_memory import Handle, numbered


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
