"""When complete groups leave a generator: together with those that are complete soon after."""

LINGER_STEPS = 4
"""Decode steps after the first complete group: others often follow."""


def enough(slots: int, group_size: int) -> int:
    """Complete groups that leave without waiting for others: a quarter of those that are decoded at
    once.
    """
    return max(1, slots // (4 * group_size))


def leaves(complete: int, since: int, *, enough: int) -> bool:
    """Whether complete groups leave now. since: decode steps at whose end some were complete.

    >>> leaves(1, since=5, enough=8), leaves(8, since=1, enough=8), leaves(1, since=4, enough=8)
    (True, True, False)
    """
    return since > LINGER_STEPS or complete >= enough
