"""How many groups a source issues at a time, and which is the last."""

ROWS_AT_ONCE = 32
"""Groups that leave a source together, at most."""


def issue_until(following: int, *, last: int | None, needed: int | None, dropped: int) -> int:
    """The number before which groups may be issued now, from `following` on.

    last: groups that there are; needed: that the steps of the run consume, None where nobody says;
    dropped: groups that the trainer gave up, each of which takes another in its place.

    >>> issue_until(60, last=None, needed=64, dropped=2)
    66
    """
    stops = (last, None if needed is None else needed + dropped)
    return min([following + ROWS_AT_ONCE, *(stop for stop in stops if stop is not None)])
