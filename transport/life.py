"""Who speaks: one number fences all that an earlier life of a process could still say; and the
answer to who is refused.
"""

from typing import NamedTuple

from transport.codec import Message, Natural


class Life(NamedTuple):
    """One life of a worker. Of two, the later is the larger, and what the earlier one still says
    counts nowhere.

    >>> Life(scheduler=1, attempt=2) < Life(scheduler=1, attempt=3) < Life(scheduler=2)
    True
    """

    scheduler: Natural = 0
    """Number of the scheduler that has started it: of two that lead a run, the later has the
    larger."""
    attempt: Natural = 0
    """How often that worker was started before, by this scheduler and by those whose run it took
    over."""

    def __str__(self) -> str:
        return f"attempt {self.attempt} of scheduler {self.scheduler}"

    @property
    def first_number(self) -> int:
        """Where it begins to count what has to be told from what other lives counted: each has 2^32
        numbers of its own, and a later one has higher ones.
        """
        return (((self.scheduler << 16) + self.attempt) << 32) + 1


class LifeMessage(Message, kw_only=True):
    """A message of one life: its receiver knows whether a later one has spoken."""

    life: Life


class Refused(Message):
    """No, and why: the answer to who is not let in, or asks what is not done."""

    error: str
    """What is wrong, what was found, what to do."""


def replaced(name: str, life: Life, present: Life) -> str:
    """Why nothing that a life of a worker says counts any more."""
    return (
        f"'{name}' was replaced: this is {life}, and {present} was started in its place, as this"
        " one was cut off or stopped for too long; it ends without touching the run"
    )
