"""What arrives in any order and leaves in order of issue, without a gap."""

from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class InOrder(Generic[T]):
    """Groups by number.

    >>> held = InOrder[str]()
    >>> held.put(1, "b"), held.take(), held.put(0, "a"), held.take(), held.take(), held.put(0, "a")
    (True, None, True, 'a', 'b', False)
    """

    def __init__(self, first: int = 0, holes: Iterable[int] = ()) -> None:
        """first: the first group to give out. holes: groups after it that will never come, because they were dropped
        or trained before a restart."""
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
