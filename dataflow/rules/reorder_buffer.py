"""The trainer's reorder buffer: groups arrive in any order and leave in order of issue, without a
gap.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import pyarrow as pa

from dataflow.runtime import Batch
from dataflow.tokens.ragged import group_slices

T = TypeVar("T")


class InOrder(Generic[T]):
    """Groups by number.

    >>> held = InOrder[str]()
    >>> held.put(1, "b"), held.take(), held.put(0, "a"), held.take(), held.take(), held.put(0, "a")
    (True, None, True, 'a', 'b', False)
    """

    def __init__(self, first: int = 0, holes: Iterable[int] = ()) -> None:
        """first: the first group to give out. holes: groups after it that will never come, because
        they were dropped or trained before a restart.
        """
        self.following = first
        """The group that is to leave next."""
        self._holes = {hole for hole in holes if hole >= first}
        self._held: dict[int, T] = {}
        self._pass_holes()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def is_ready(self) -> bool:
        """Whether the next group is here."""
        return self.following in self._held

    def put(self, number: int, group: T) -> bool:
        """Take one in; False for one that was here before, or that was never to come."""
        if number < self.following or number in self._held or number in self._holes:
            return False
        self._held[number] = group
        return True

    def take(self) -> T | None:
        """The next in order; None while it is not here."""
        group = self._held.pop(self.following, None)
        if group is not None:
            self.following += 1
            self._pass_holes()
        return group

    def rest(self) -> list[T]:
        """Everything that is left, in order; for the end of the rows."""
        groups = [self._held[number] for number in sorted(self._held)]
        self._held.clear()
        return groups

    def _pass_holes(self) -> None:
        while self.following in self._holes:
            self._holes.remove(self.following)
            self.following += 1


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
        super().__init__(first, holes)
        self.rows = 0
        """Rows it holds."""

    def add(self, batch: Batch) -> int:
        """Take the groups of a batch in, releasing those that were here before; the number of new
        rows.
        """
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
