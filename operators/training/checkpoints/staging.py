"""A checkpoint in the background: copies of tensors on a GPU, and one thread that writes; imports
torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dataflow.errors import DeadlineError
from dataflow.system.clocks import Countdown


@dataclass
class StagingBuffers:
    """Copies of tensors in main memory, in buffers that stay: fresh memory takes several times as
    long to fill.
    """

    _buffers: dict[str, Tensor] = field(default_factory=dict)
    _devices: set[torch.device] = field(default_factory=set)

    def copied(self, name: str) -> Callable[[Tensor], Tensor]:
        """What brings a tensor of that name to main memory: one that is there is itself."""
        return lambda tensor: self.copy(name, tensor) if tensor.is_cuda else tensor

    @torch.no_grad()
    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of the tensor, once `settle` was called; it stands until the next copy under that
        name.
        """
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        return buffer.copy_(tensor, non_blocking=True)

    def settle(self) -> None:
        """Wait for copies from accelerators."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()


class Background:
    """One piece of work at a time, in a thread.

    consumes: a function by `start`
    produces: its effects; its error, raised once, by the next `wait` or `start`
    waits for: in `wait` and `start`, the work under way, with a deadline
    unblocked by: its end
    """

    def __init__(self, activity: str) -> None:
        """activity: what is under way, for errors."""
        self._what = activity
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, work: Callable[[], None], deadline_s: float) -> None:
        """Begin; first the work under way is waited for, as in `wait`."""
        self.wait(deadline_s)
        self._thread = threading.Thread(
            target=self._run, args=(work,), name=self._what, daemon=True
        )
        self._thread.start()

    def wait(self, deadline_s: float) -> None:
        """Until nothing is under way. Raises what the work raised; DeadlineError after so many
        seconds.
        """
        wait = Countdown(deadline_s)
        while self._thread is not None and not self.is_idle and not wait.is_over:
            self._thread.join(wait.slice_s)
        if not self.is_idle:
            raise DeadlineError(
                f"{self._what} was not over after {deadline_s:.0f} s; the disk may hang: look at it"
                " and its log, then resume from the checkpoint before"
            )
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
