"""Where a transfer's bytes lie and are worked on, beside what the program computes there: a queue
of its own, marks in both, copies and sums that nothing waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from transport.native import Copier, Summer
from transport.weights.executors.peer_memory import numbered

Mark = Any
"""A point in a queue of the device."""


class TransferDevice:
    """One device, with a queue for transfers. Any thread may use it; only `reached` looks whether
    something is done, and nothing waits.

    This one is the processor, where all is done at once.
    """

    is_behind = False
    """Whether it works behind the program: what is asked for is not there at once."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def another(self) -> TransferDevice:
        """The same device, with another queue: what stands in one holds up none of the others."""
        return self

    def beside(self) -> AbstractContextManager[None]:
        """What this thread asks for inside goes to the transfers' queue, not to the program's."""
        return nullcontext()

    def mark(self) -> Mark:
        """After all that this thread has asked for so far in the queue that it uses."""
        return None

    def after(self, mark: Mark) -> None:
        """What this thread asks for from now on begins after the mark. The thread goes on."""

    def reached(self, mark: Mark) -> bool:
        """Whether the device has come to the mark."""
        return True

    def uses(self, tensors: Iterable[torch.Tensor]) -> None:
        """The queue that this thread uses reads or writes these: their memory is given to nobody
        before it has come so far.
        """

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in main memory, whole once a later mark is reached."""
        return tensor

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] in main memory, under an address of this device."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def copier(
        self,
        destinations: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor] | None = None,
    ) -> Copier:
        """Copies into tensors of this device."""
        return Copier(destinations, sources)

    def summer(self, tensors: Sequence[torch.Tensor]) -> Summer:
        """Sums of tensors of this device."""
        return Summer(tensors)


class CudaDevice(TransferDevice):
    """A GPU: transfers have a stream of their own, a mark is an event."""

    is_behind = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def another(self) -> TransferDevice:
        """Another stream."""
        return CudaDevice(self.device)

    def beside(self) -> AbstractContextManager[None]:
        """The stream is the thread's current one inside."""
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        """An event on the thread's current stream."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def after(self, mark: Mark) -> None:
        """The thread's current stream waits for the event."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def reached(self, mark: Mark) -> bool:
        """Whether the event is over."""
        return mark is None or bool(mark.query())

    def uses(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tell torch's allocator of the thread's current stream."""
        stream = torch.cuda.current_stream(self.device)
        for tensor in tensors:
            if tensor.device == self.device:
                tensor.record_stream(stream)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Pinned memory, which a GPU reaches under its address (CUDA's unified addressing)."""
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return torch.as_tensor(_Addressed(pinned), device=self.device)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory; what lies in main memory stays there."""
        if tensor.device.type == "cpu":
            return tensor
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)


class _Addressed:
    """Bytes by their address alone, as `__cuda_array_interface__` has it; keeps them."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self._pinned = pinned

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self._pinned.numel(),),
            "typestr": "|u1",
            "data": (self._pinned.data_ptr(), False),
            "version": 2,
        }


def transfer_device(device: str | torch.device | TransferDevice) -> TransferDevice:
    """The device of this name; `cuda` is the GPU that is current."""
    if isinstance(device, TransferDevice):
        return device
    resolved = numbered(device)
    return CudaDevice(resolved) if resolved.type == "cuda" else TransferDevice(resolved)
