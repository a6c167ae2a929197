"""What a tracker's process and the run say to each other."""

from collections.abc import Sequence
from typing import Any

from dataflow.system.messages import Codec, Message
from dataflow.trackers.chosen import ChosenTracker

LONGEST = 600
"""Characters of a text for people."""
SEND_S = 5.0
"""For the other side to read."""

# From a tracker's process


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


# To a tracker's process


class TrackRun(Message):
    """Tell a tracker of a run; the first message."""

    folder: str
    tracker: ChosenTracker
    path: Sequence[str]
    """Where modules are found."""
    leader: int
    """The scheduler whose tracker this is; 0: whoever that is."""
    within_s: float
    """To take in what is left, once nobody leads the run."""
    steps_back: bool
    """Whether it has what nobody else wants of processors and disks."""


class RunIsOver(Message):
    """Tell what is left, and finish."""

    outcome: str
    """finished | stopped | failed | died."""


class LeaveRun(Message):
    """End, so that another goes on from there later: the run's disk is full, or nobody waits any
    more.
    """


TRACKER_CODEC: Codec[Any] = Codec(
    "tracker",
    1,
    TrackerAt,
    TrackerSees,
    TrackerToldOf,
    TrackerFailed,
    TrackerDone,
    TrackRun,
    RunIsOver,
    LeaveRun,
)
