"""Rows that came together, and whose groups come to their ends one by one."""

from collections.abc import Callable


class Share:
    """Acknowledges rows that came together once none of their groups is needed, and before that each that is not."""

    def __init__(self, ack: Callable[[], None], early: Callable[[int], None], groups: int) -> None:
        """groups: how many there are; with none they are acknowledged at once."""
        self._ack, self._early, self._left = ack, early, groups
        if not groups:
            ack()

    def release(self, group_id: int) -> None:
        """One of them is not needed."""
        self._left -= 1
        if self._left:
            self._early(group_id)
        else:
            self._ack()
