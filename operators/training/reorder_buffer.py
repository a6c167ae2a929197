"""The trainer's reorder buffer: groups arrive in any order and leave in order of issue."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from dataflow.records import group_slices
from dataflow.rules.in_order import InOrder
from dataflow.runtime import Batch


@dataclass(frozen=True)
class QueuedGroup:
    """The rollouts of one prompt."""

    group_id: int
    records: pa.RecordBatch
    release: Callable[[], None]
    """To be called once, when the group has been trained or dropped."""


class ReorderBuffer(InOrder[QueuedGroup]):
    """Groups by group_id, given out one after the other without a gap."""

    def __init__(self, first: int = 0, holes: Iterable[int] = ()) -> None:
        """As `InOrder`."""
        super().__init__(first, holes)
        self.rows = 0
        """Rows it holds."""

    def add(self, batch: Batch) -> int:
        """Take the groups of a batch in, releasing those that were here before; the number of new rows."""
        new = 0
        for group_id, first, count in group_slices(batch.records):
            records = batch.records.slice(first, count)
            if self.put(group_id, QueuedGroup(group_id, records, partial(batch.release, group_id))):
                new += count
            else:
                batch.release(group_id)
        self.rows += new
        return new

    def take(self) -> QueuedGroup | None:
        """The next group in order; None while it is not here."""
        group = super().take()
        if group is not None:
            self.rows -= group.records.num_rows
        return group

    def rest(self) -> list[QueuedGroup]:
        """Everything that is left, in order; for the end of the rows."""
        self.rows = 0
        return super().rest()
