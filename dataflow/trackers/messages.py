"""What a tracker's process, the keeper of all trackers, and the run say to each other."""

from collections.abc import Sequence
from typing import Any

from dataflow.limits import Limits
from dataflow.system.messages import Codec, Message
from dataflow.trackers.chosen import ChosenTracker

LONGEST = 600
"""Characters of a text for people."""

# From a tracker's process to its keeper


class TrackerAt(Message):
    """A sign of life."""

    call: str
    """Of the tracker, that begins now; empty: it waits for lines."""


class TrackerSees(Message):
    """Where to look."""

    text: str


class TrackerToldOf(Message):
    """A batch was taken in."""

    lines: int


class TrackerFailed(Message):
    """It ends."""

    call: str
    error: str


class TrackerDone(Message):
    """All is told; it ends."""


# From the keeper to a tracker's process, and from the run to the keeper


class RunIsOver(Message):
    """Tell what is left, and finish."""

    outcome: str
    """finished | stopped | failed | died."""


class LeaveRun(Message):
    """End, so that another goes on from there later: the run's disk is full, or nobody waits any
    more.
    """


# From the run to the keeper


class KeepTrackers(Message):
    """Which trackers of which run."""

    folder: str
    trackers: Sequence[ChosenTracker]
    limits: Limits
    path: Sequence[str]
    """Where modules are found."""
    parent: int
    """The process of the run."""


# From the keeper to the run


class KeeperSays(Message):
    """For people."""

    text: str


TRACKER_CODEC: Codec[Any] = Codec(
    "tracker",
    1,
    TrackerAt,
    TrackerSees,
    TrackerToldOf,
    TrackerFailed,
    TrackerDone,
    RunIsOver,
    LeaveRun,
)
KEEPER_CODEC: Codec[Any] = Codec("keeper", 1, KeepTrackers, RunIsOver, KeeperSays)
