"""The reorder buffer at the trainer's door: groups arrive in any order and leave in order of issue."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from dataflow.records import group_slices
from dataflow.runtime import Batch


@dataclass(frozen=True)
class QueuedGroup:
    """The rollouts of one prompt."""

    group_id: int
    records: pa.RecordBatch
    release: Callable[[], None]
    """To be called once, when the group has been trained or dropped."""


class ReorderBuffer:
    """Groups by group_id, given out one after the other without a gap.

    first: the first group to give out. holes: groups after it that will never come, because they were dropped
    or trained before a restart.
    """

    def __init__(self, first: int = 0, holes: Iterable[int] = ()) -> None:
        self.following = first
        """The group that is to leave next."""
        self._holes = {hole for hole in holes if hole >= first}
        self._held: dict[int, QueuedGroup] = {}
        self.rows = 0
        """Rows it holds."""
        self._pass_holes()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def is_ready(self) -> bool:
        """Whether the next group is here."""
        return self.following in self._held

    def add(self, batch: Batch) -> int:
        """Take the groups of a batch in, releasing those that were here before; the number of new rows."""
        new = 0
        for group_id, first, count in group_slices(batch.records):
            if group_id < self.following or group_id in self._held or group_id in self._holes:
                batch.release(group_id)
                continue
            records = batch.records.slice(first, count)
            self._held[group_id] = QueuedGroup(group_id, records, partial(batch.release, group_id))
            new += count
        self.rows += new
        return new

    def take(self) -> QueuedGroup | None:
        """The next group in order; None while it is not here."""
        group = self._held.pop(self.following, None)
        if group is not None:
            self.rows -= group.records.num_rows
            self.following += 1
            self._pass_holes()
        return group

    def rest(self) -> list[QueuedGroup]:
        """Everything that is left, in order; for the end of the rows."""
        groups = [self._held[group_id] for group_id in sorted(self._held)]
        self._held.clear()
        self.rows = 0
        return groups

    def _pass_holes(self) -> None:
        while self.following in self._holes:
            self._holes.remove(self.following)
            self.following += 1
