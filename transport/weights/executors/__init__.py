"""The ways in which bytes of weights move: in one process, in shared memory, in a GPU's memory; and
what such an executor of the weight plane provides: gated segments of memory, and messages both
ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from transport.weights.protocol.messages import ReaderMessage, WriterMessage

if TYPE_CHECKING:
    import torch
    import zmq


class WriterSegment(Protocol):
    """One buffer, seen by the writer. Readers enter and leave; a sealed segment is empty and stays
    so.
    """

    key: str
    """Under which readers open it."""
    buffer: torch.Tensor
    """uint8[layout.nbytes]."""
    progress: torch.Tensor | None
    """int64[2]: the version that is being written, and the bytes of it that are whole; None: nobody
    reads along."""

    def seal(self) -> bool:
        """Close the gate if no reader is inside; the content is void, and so is `progress`. Never
        waits.
        """

    def unseal(self, version: int) -> None:
        """Open the gate to readers that look for this version (-1: to none)."""

    def retire(self) -> None:
        """No reader can open it any more; those inside keep its memory."""

    def close(self) -> None:
        """Give it back; the memory goes when the last reader has left."""


class WriterPort(Protocol):
    """The writer's end."""

    def segment(self, nbytes: int) -> WriterSegment:
        """A new segment of zeros, its gate sealed. SegmentError when there is no memory for it."""

    def receive(self) -> list[tuple[bytes, ReaderMessage]]:
        """All messages that have arrived, each with its sender. Never waits."""

    def send(self, peer: bytes, message: WriterMessage) -> bool:
        """Hand over one message; False when the peer is known to be gone. Never waits."""

    def wait(self, timeout_s: float) -> None:
        """Until a message arrives, at most that long."""

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        """What a loop may poll to learn that messages wait; None in one process."""

    def close(self) -> None:
        """Leave the address."""


class ReaderSegment(Protocol):
    """One buffer, seen by one reader."""

    buffer: torch.Tensor
    """uint8[layout.nbytes]; its content stands still between `enter` and `leave`."""
    progress: torch.Tensor | None
    """As the writer's: the bytes below it stand still while its version does. None: enter first."""

    def enter(self, version: int) -> bool:
        """Step inside; False when it is sealed or holds another version. Never waits."""

    def leave(self) -> None:
        """Step out."""

    def close(self) -> None:
        """Forget it; the memory goes when no tensor refers to it any more."""


class ReaderPort(Protocol):
    """A reader's end."""

    def segment(self, key: str, nbytes: int) -> ReaderSegment | None:
        """Open a segment; None when it is gone."""

    def receive(self) -> list[WriterMessage]:
        """All messages that have arrived. Never waits."""

    def send(self, message: ReaderMessage) -> None:
        """Send one message; it may be lost when there is no listener. Never waits."""

    def wait(self, timeout_s: float) -> None:
        """Until a message arrives, at most that long."""

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        """What a loop may poll to learn that messages wait; None in one process."""

    def close(self) -> None:
        """Disconnect."""


class Site(Protocol):
    """A place where one writer and its readers meet."""

    def writer(self, poll: Callable[[], None]) -> WriterPort:
        """Claim it. AddressTaken when another live writer has.

        `poll` lets a reader of the same thread wait: the writer's answers would never come
        otherwise.
        """

    def reader(self) -> ReaderPort:
        """Connect to it, whether its writer is there yet or not."""
