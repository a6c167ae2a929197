"""Which receivers a batch goes to: pure functions of the room that each receiver has."""

from collections.abc import Sequence
from typing import Literal

Partition = Literal["balanced", "keyed", "broadcast"]
"""balanced: most credit first. keyed: the same key always to the same receiver. broadcast: to all of them."""


def choose(partition: Partition, rooms: Sequence[int], key: int | None = None) -> tuple[int, ...]:
    """Indices of the receivers that take the batch; none when it has to wait.

    `rooms` holds the rows that each receiver has credit for, 0 where this batch does not fit. Ties go to the
    lowest index. Raises ValueError for a keyed edge without a key.
    """
    if partition == "broadcast":
        return tuple(range(len(rooms))) if all(rooms) else ()
    if partition == "keyed":
        if key is None:
            raise ValueError("a keyed edge needs a key for every batch; got none; pass send(batch, key=...)")
        chosen = key % len(rooms)
        return (chosen,) if rooms[chosen] else ()
    best = max(range(len(rooms)), key=lambda index: rooms[index])
    return (best,) if rooms[best] else ()


def room_rows(partition: Partition, rooms: Sequence[int]) -> int:
    """Rows of the largest batch that would be taken now, whatever its key."""
    return max(rooms) if partition == "balanced" else min(rooms)
