"""The ends of an edge as a node's loop sees them."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

Acked: TypeAlias = Callable[[Iterable[int]], None]
"""Called with numbers of a batch's rows once they are acknowledged: with each row once."""


class Inlet(Protocol):
    """The receiving end of an edge (transport.data.Receiver)."""

    def receive(self, timeout_s: float = 0.0) -> Any | None:
        """A delivery with `batch`, `sender`, `ack_rows` and `ack`, or None."""

    def poll(self) -> None:
        """Take in what arrived, answer the senders."""

    def flush(self) -> None:
        """Answer the senders."""

    @property
    def finished(self) -> bool:
        """Whether every sender has ended its stream and all of it was received."""


class Outlet(Protocol):
    """The sending end of an edge (transport.data.Sender)."""

    def send(self, batch: pa.RecordBatch, acked: Acked) -> bool:
        """False when there is no credit now; then nothing was taken."""

    def poll(self) -> None:
        """Take in grants and acknowledgements."""

    def finish(self) -> None:
        """End the stream."""
