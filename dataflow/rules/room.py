"""How many rows an operator accepts before it has finished others."""

from collections.abc import Iterable

_PROMPTS = 64
"""Of one source, that wait at a generator however few rollouts it decodes at once."""


def prompt_room(slots: int, waiting: Iterable[int]) -> int:
    """Prompts that a generator takes now: above 0 while any source has no prompt waiting there.

    slots: rollouts that it decodes at once; waiting: prompts of each of its sources that have not
    started.
    """
    return max(0, max(_PROMPTS, slots) - min(waiting, default=0))


def queue_prompts(asked: int | None, prompts_per_step: int, max_staleness: int) -> int:
    """Groups that wait at a trainer: as it was asked to, or those of the step under way and of all
    that may be ahead.

    >>> queue_prompts(None, prompts_per_step=32, max_staleness=4)
    192
    """
    return (max_staleness + 2) * prompts_per_step if asked is None else asked


def row_room(groups: int, group_rows: int, held: int, *, is_ready: bool) -> int:
    """Rows that a trainer takes now; never 0 while the next group in order is missing.

    groups: that may wait; group_rows: rows of one; held: rows that wait; is_ready: whether the next
    group is there.
    """
    return max(0 if is_ready else 1, groups * group_rows - held)


def starts(count: int, wanted: int, *, idle: bool, slots: int) -> bool:
    """Whether a group starts of which so many rollouts fit of those that it wants: it waits until
    all do, unless it is larger than a quarter of the slots or nothing else is at work (idle).

    >>> starts(8, 8, idle=False, slots=64), starts(7, 8, idle=False, slots=64)
    (True, False)
    >>> starts(7, 8, idle=True, slots=64)
    True
    """
    return count >= wanted or (count > 0 and (idle or wanted * 4 > slots))
