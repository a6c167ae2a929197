"""Credit in rows and bytes: what a sender may have in flight, and how receivers share out what they
can hold.

Pure: values in, values out, no clock. A receiver gives each sender a *window*, the most it may have
unacknowledged. A window is a statement, not a token, so a lost or repeated message cannot make it
drift.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transport.errors import BatchTooLarge


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """An amount of rows and bytes."""

    rows: int
    """Rows of a record batch; an empty batch costs one."""
    bytes: int
    """Encoded bytes."""

    def __add__(self, other: "Credit") -> "Credit":
        return Credit(rows=self.rows + other.rows, bytes=self.bytes + other.bytes)

    def __sub__(self, other: "Credit") -> "Credit":
        return Credit(rows=self.rows - other.rows, bytes=self.bytes - other.bytes)

    def within(self, limit: "Credit") -> bool:
        """Whether neither rows nor bytes exceed `limit`."""
        return self.rows <= limit.rows and self.bytes <= limit.bytes

    def least(self, other: "Credit") -> "Credit":
        """The smaller of each."""
        return Credit(rows=min(self.rows, other.rows), bytes=min(self.bytes, other.bytes))

    def most(self, other: "Credit") -> "Credit":
        """The larger of each."""
        return Credit(rows=max(self.rows, other.rows), bytes=max(self.bytes, other.bytes))


NONE = Credit(rows=0, bytes=0)
ONE = Credit(rows=1, bytes=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What one sender takes of a receiver's capacity."""

    promised: Credit
    """The largest window that the sender may still be using."""
    held: Credit
    """Received from the present life of the sender and not yet acknowledged."""
    earlier: Credit
    """Received from earlier lives and not yet acknowledged."""


def cost(rows: int, size_bytes: int) -> Credit:
    """What a batch takes: never nothing, so that the number of batches is bounded too."""
    return Credit(rows=max(1, rows), bytes=max(1, size_bytes))


def check_fits(batch: Credit, capacity: Credit, *, edge: str) -> None:
    """Raise BatchTooLarge for what a receiver will never take."""
    if not batch.within(capacity):
        raise BatchTooLarge(
            f"a batch on edge '{edge}' can never be sent; got {batch.rows} rows and {batch.bytes}"
            f" bytes, the receiver holds {capacity.rows} and {capacity.bytes}; send less at once,"
            " or raise capacity_rows and capacity_bytes of the receiver"
        )


def may_send(batch: Credit, used: Credit, window: Credit) -> bool:
    """Whether a batch may leave now.

    A batch larger than the window travels alone: it waits until nothing else is in flight. So a
    window that shrank, because more senders joined, delays a large batch and never blocks it for
    ever.
    """
    return ONE.within(window) and (used == NONE or (used + batch).within(window))


def room_rows(used: Credit, window: Credit) -> int:
    """Rows that a window has left; 0 when its bytes are used up."""
    free = window - used
    return max(0, free.rows) if free.bytes > 0 else 0


def next_receiver(rooms: Sequence[int], *, last: int = -1, slack: int = 0) -> int | None:
    """Which receiver takes the next batch: the next after `last` of those whose room in rows is the
    most, or `slack` less at most; None: none has any. By room alone whoever has just given back a
    step's would take all of another one.

    >>> rooms = [2, 5, 5]
    >>> next_receiver(rooms), next_receiver(rooms, last=1), next_receiver(rooms, last=2, slack=3)
    (1, 2, 0)
    """
    least = max(1, max(rooms, default=0) - slack)
    turns = ((last + turn) % len(rooms) for turn in range(1, len(rooms) + 1))
    return next((index for index in turns if rooms[index] >= least), None)


def allot(capacity: Credit, expected: int, holdings: Mapping[str, Holding]) -> dict[str, Credit]:
    """The window of every sender, by name: an equal share of what is held for nobody else.

    `expected` senders (or as many as are known, if more) share the capacity. Whoever comes when
    others still use larger windows gets what is left, and the rest as soon as they gave it back:
    promises and held batches together stay within the capacity.
    """
    count = max(1, expected, len(holdings))
    share = Credit(rows=capacity.rows // count, bytes=capacity.bytes // count).most(ONE)
    reserved = {
        name: holding.promised.most(holding.held) + holding.earlier
        for name, holding in holdings.items()
    }
    total = sum(reserved.values(), NONE)
    windows: dict[str, Credit] = {}
    for name in sorted(holdings):
        earlier = holdings[name].earlier
        free = capacity - (total - reserved[name])
        window = (share.least(free) - earlier).most(NONE)
        windows[name] = window if ONE.within(window) else NONE
        now = reserved[name].most(windows[name] + earlier)
        total = total + now - reserved[name]
        reserved[name] = now
    return windows
