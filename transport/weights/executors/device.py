"""Where a transfer's bytes lie and are worked on, beside what the program computes there: a queue
of its own, marks in both, copies and sums that nothing waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from transport.native import Copier, Summer
from transport.weights.executors.device_memory import numbered

Mark = Any
"""A point in a queue of the device."""


class Copies(Protocol):
    """Copies that are compiled once: see `Copier`."""

    @property
    def nbytes(self) -> int:
        """That they write."""

    def start(
        self, sources: Sequence[torch.Tensor] | None = None, sums: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Ask for all; s1 and s2 of what each writes, int64[n, 2], on the device."""


class Sums(Protocol):
    """Sums that are compiled once: see `Summer`."""

    def start(self, sums: torch.Tensor | None = None) -> torch.Tensor:
        """Ask for all; s1 and s2 of each tensor, int64[n, 2], on the device."""


class TransferDevice(Protocol):
    """One device, with a queue for transfers. Any thread may use it; only `reached` looks whether
    something is done, and nothing waits.
    """

    device: torch.device
    is_behind: bool
    """Whether it works behind the program: what is asked for is not there at once."""

    def another(self) -> TransferDevice:
        """The same device, with another queue: what stands in one holds up none of the others."""

    def beside(self) -> AbstractContextManager[None]:
        """What this thread asks for inside goes to the transfers' queue, not to the program's."""

    def mark(self) -> Mark:
        """After all that this thread has asked for so far in the queue that it uses."""

    def after(self, mark: Mark) -> None:
        """What this thread asks for from now on begins after the mark. The thread goes on."""

    def reached(self, mark: Mark) -> bool:
        """Whether the device has come to the mark."""

    def uses(self, tensors: Iterable[torch.Tensor]) -> None:
        """The queue that this thread uses reads or writes these: their memory is given to nobody
        before it has come so far.
        """

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in main memory, whole once a later mark is reached."""

    def copier(
        self,
        destinations: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor] | None = None,
        *,
        threads: int = 1,
    ) -> Copies:
        """Copies into tensors of this device."""

    def summer(self, tensors: Sequence[torch.Tensor]) -> Sums:
        """Sums of tensors of this device."""


class HostDevice:
    """The processor: what is asked for is done at once."""

    is_behind = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def another(self) -> TransferDevice:
        """Itself: it has no queue."""
        return self

    def beside(self) -> AbstractContextManager[None]:
        """Nothing changes."""
        return nullcontext()

    def mark(self) -> Mark:
        """None: everything is done."""
        return None

    def after(self, mark: Mark) -> None:
        """At once."""

    def reached(self, mark: Mark) -> bool:
        """It has."""
        return True

    def uses(self, tensors: Iterable[torch.Tensor]) -> None:
        """Memory is used by whoever runs."""

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Itself."""
        return tensor

    def copier(
        self,
        destinations: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor] | None = None,
        *,
        threads: int = 1,
    ) -> Copies:
        """By the kernels of the tensors' device."""
        return Copier(destinations, sources, threads=threads)

    def summer(self, tensors: Sequence[torch.Tensor]) -> Sums:
        """By the kernels of the tensors' device."""
        return Summer(tensors)


class CudaDevice(HostDevice):
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

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Into pinned memory."""
        here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return here.copy_(tensor, non_blocking=True)


def transfer_device(device: str | torch.device | TransferDevice) -> TransferDevice:
    """The device of this name; `cuda` is the GPU that is current."""
    if not isinstance(device, str | torch.device):
        return device
    resolved = numbered(device)
    return CudaDevice(resolved) if resolved.type == "cuda" else HostDevice(resolved)
