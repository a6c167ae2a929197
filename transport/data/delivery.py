"""One batch in the hands of a consumer, and its acknowledgement."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa


@dataclass(kw_only=True, slots=True)
class Delivery:
    """One batch in the consumer's hands."""

    batch: pa.RecordBatch
    """The rows, checked; its buffers may lie in the memory of the message that brought them."""
    sender: str
    """Who sent it."""
    epoch: int
    """Incarnation of the sender."""
    sequence: int
    """Its number, 0, 1, 2, ... per sender and epoch; it goes on when this receiver left and joins
    again."""
    acknowledge: Callable[[str, int, int], None]
    """The receiver's side, of all rows."""
    acknowledge_rows: Callable[[str, int, int, int, int], None]
    """The receiver's side, of some rows before the others."""

    left: int = field(init=False)
    """Rows that are not acknowledged."""

    def __post_init__(self) -> None:
        self.left = self.batch.num_rows

    def ack(self) -> None:
        """The consumer is done with all rows: credit returns, the sender forgets the batch. Twice
        does no harm.
        """
        self.left = 0
        self.acknowledge(self.sender, self.epoch, self.sequence)

    def ack_rows(self, first: int, count: int) -> None:
        """The consumer is done with some rows, each of which it names once. With the last of them
        all is as after `ack`; before that the sender hears of them with the next `flush`, and the
        batch keeps its credit.
        """
        self.left -= count
        if self.left > 0:
            self.acknowledge_rows(self.sender, self.epoch, self.sequence, first, count)
        else:
            self.acknowledge(self.sender, self.epoch, self.sequence)
